"""The states between two layers, on disk: a run that was killed goes on from them."""

import os
import re
from dataclasses import dataclass
from pathlib import Path

import torch
from blake3 import blake3
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from moet.errors import PackError
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
    """Durable once it returns. Raises PackError if there is no space for it, or it cannot be written."""
    tensors = _tensors("full", streams.full)
    for name, tensor in _tensors("quantized", streams.quantized).items():
        if tensor.data_ptr() != tensors[name.replace("quantized", "full")].data_ptr():
            tensors[name] = tensor
    carries = -1 if streams.full.carry is None else len(streams.full.carry)
    path = _path(root, streams.next)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = durable.work_dir(root) / "tmp-calibration"
    metadata = {"carries": str(carries), "digest": _digest(streams.full.ids, tensors)}
    try:
        save_file(tensors, temporary, metadata=metadata)
    except SafetensorError as e:  # what it makes of an OSError
        raise PackError(
            f"{root}: expected to be able to write the calibration's states, found: {e}. Finished layers are kept: "
            "make room and run the same command again"
        ) from None
    with temporary.open("rb") as file:
        os.fsync(file.fileno())
    os.replace(temporary, path)
    durable.sync_dir(path.parent)


def read(root: Path, next: int, ids: torch.Tensor) -> Streams | None:
    """The streams before layer `next`, or None if there is no such file, it is damaged, or it is of other tokens."""
    try:
        with safe_open(_path(root, next), "pt") as file:
            metadata, tensors = file.metadata() or {}, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError):
        return None
    if metadata.get("digest") != _digest(ids, tensors):
        return None
    carries = int(metadata["carries"])

    def states(name: str, like: States | None) -> States:
        """What is not stored is the same as in `like`."""
        hidden, *carry = (tensors.get(f"{name}{x}") for x in ("", *(f".{i}" for i in range(carries))))
        if like is not None:
            hidden = like.hidden if hidden is None else hidden
            carry = [c if c is not None else l for c, l in zip(carry, like.carry or (), strict=True)]
        return States(ids, hidden, tuple(carry) if carries >= 0 else None)

    full = states("full", None)
    return Streams(next, full, states("quantized", full) if "quantized" in tensors else full)


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


def _digest(ids: torch.Tensor, tensors: dict[str, torch.Tensor]) -> str:
    """blake3 of the tokens and of everything that is known after them: a flipped bit would change codes, and nobody would
    ever see it."""
    found = blake3(max_threads=blake3.AUTO)
    for name, tensor in (("ids", ids.contiguous()), *sorted(tensors.items())):
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        found.update(tensor.flatten().view(torch.uint8).numpy())
    return found.hexdigest()


def _path(root: Path, next: int) -> Path:
    return root / FOLDER / f"before-{next:03d}.safetensors"
