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
    tensors = {}
    for name, states in (("full", streams.full), ("quantized", streams.quantized)):
        if name == "full" or not streams.same:
            tensors[name] = states.hidden.contiguous()
            for i, carry in enumerate(states.carry or ()):
                if carry is not None:
                    tensors[f"{name}.{i}"] = carry.contiguous()
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

            def states(name: str) -> States:
                extra = (f"{name}.{i}" for i in range(carries))
                carry = (
                    tuple(file.get_tensor(x) if x in names else None for x in extra) if carries >= 0 else None
                )
                return States(ids, file.get_tensor(name), carry)

            full = states("full")
            quantized = states("quantized") if "quantized" in names else full
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


def _path(root: Path, next: int) -> Path:
    return root / FOLDER / f"before-{next:03d}.safetensors"
