"""The states between two layers, on disk: a run that was killed goes on from them."""

import os
import re
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from moet.forward import States
from moet.pack import durable

FOLDER = f"{durable.WORK}/calibration"


@dataclass(frozen=True)
class Streams:
    """Both networks' states before layer `next`. quantized is the same object as full as long as no layer before is
    at 2 bits."""

    next: int
    full: States
    quantized: States

    @property
    def same(self) -> bool:
        return self.full is self.quantized


def write(root: Path, streams: Streams) -> None:
    """Durable once it returns."""
    tensors = _tensors("full", streams.full)
    for name, tensor in _tensors("quantized", streams.quantized).items():
        if tensor.data_ptr() != tensors[name.replace("quantized", "full")].data_ptr():
            tensors[name] = tensor
    carries = -1 if streams.full.carry is None else len(streams.full.carry)
    path = _path(root, streams.next)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = durable.work_dir(root) / "tmp-calibration"
    save_file(tensors, temporary, metadata={"carries": str(carries)})
    with temporary.open("rb") as file:
        os.fsync(file.fileno())
    os.replace(temporary, path)
    durable.sync_dir(path.parent)


def read(root: Path, next: int, ids: torch.Tensor) -> Streams | None:
    """The streams before layer `next`, or None if there is no such file, or it is of other tokens."""
    try:
        with safe_open(_path(root, next), "pt") as file:
            carries, names = int(file.metadata()["carries"]), set(file.keys())

            def tensor(name: str) -> torch.Tensor | None:
                return file.get_tensor(name) if name in names else None

            def states(name: str, like: States | None) -> States:
                """What is not stored is the same as in `like`."""
                hidden, *carry = (tensor(f"{name}{x}") for x in ("", *(f".{i}" for i in range(carries))))
                if like is not None:
                    hidden = like.hidden if hidden is None else hidden
                    carry = [c if c is not None else l for c, l in zip(carry, like.carry or (), strict=True)]
                return States(ids, hidden, tuple(carry) if carries >= 0 else None)

            full = states("full", None)
            quantized = states("quantized", full) if "quantized" in names else full
    except (FileNotFoundError, SafetensorError):
        return None
    return Streams(next, full, quantized) if full.hidden.shape[:2] == ids.shape else None


def there(root: Path) -> list[int]:
    """Layers before which states are stored, ascending."""
    found = (re.fullmatch(r"before-(\d+)\.safetensors", p.name) for p in (root / FOLDER).glob("before-*"))
    return sorted(int(m[1]) for m in found if m)


def forget(root: Path, before: int) -> None:
    """Removes the states before layers lower than `before`."""
    for index in there(root):
        if index < before:
            _path(root, index).unlink()


def _tensors(name: str, states: States) -> dict[str, torch.Tensor]:
    found = {name: states.hidden.contiguous()}
    return found | {f"{name}.{i}": c.contiguous() for i, c in enumerate(states.carry or ()) if c is not None}


def _path(root: Path, next: int) -> Path:
    return root / FOLDER / f"before-{next:03d}.safetensors"
