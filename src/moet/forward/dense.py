"""The tensors that are no routed experts, as float: multiplied out where the checkpoint quantizes them too."""

from collections.abc import Iterable

import numpy as np
import torch

from moet.checkpoint import Checkpoint, TensorInfo, dequantize
from moet.checkpoint.formats import detect
from moet.checkpoint.names import SUFFIXES, Role
from moet.checkpoint.parts import Parts, Piece
from moet.checkpoint.reader import Reader, Span
from moet.errors import CheckpointError

PLAIN = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "BOOL": torch.bool,
}  # fmt: skip
PACKED = ("U8", "I8")
"""Two E2M1 codes a byte."""
SCALES = {suffix for suffix, role in SUFFIXES.items() if role in ("scale", "multiplier", "divisor", "input")}


class DenseTensors:
    """The dense tensors of a checkpoint by the name they have without quantization: `X.weight`, whatever
    scales are stored beside it."""

    def __init__(self, checkpoint: Checkpoint, names: Iterable[str]) -> None:
        self.checkpoint = checkpoint
        self._reader = Reader()
        self._parts: dict[str, dict[Role, str]] = {}
        given = set(names)
        scales: dict[str, dict[Role, str]] = {}
        for name in given:
            stem, _, suffix = name.rpartition(".")
            if suffix in SCALES and given & {f"{stem}.weight", f"{stem}.weight_packed"}:
                scales.setdefault(stem, {})[SUFFIXES[suffix]] = name
        taken = {name for roles in scales.values() for name in roles.values()}
        for name in sorted(given - taken):
            stem, _, suffix = name.rpartition(".")
            roles: dict[Role, str] = {"codes": name}
            if suffix in ("weight", "weight_packed"):
                roles |= scales.get(stem, {})
                name = f"{stem}.weight"
            self._parts[name] = roles

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._parts)

    def stored(self, name: str) -> tuple[str, ...]:
        """Names of the tensors in the checkpoint that make up this one."""
        return tuple(self._parts[name].values())

    def read(self, name: str) -> torch.Tensor:
        """float32 if it was quantized, else in the stored dtype. Raises CheckpointError for a dtype or a
        quantization that is not known."""
        roles = self._parts[name]
        info = self.checkpoint.tensor_info(roles["codes"])
        if info.dtype in PLAIN:
            data = self.checkpoint.read(roles["codes"])
            return torch.frombuffer(bytearray(data), dtype=PLAIN[info.dtype]).reshape(info.shape)
        if len(info.shape) != 2:
            raise CheckpointError(
                f"{info.file}, tensor {info.name}: expected a dtype of {', '.join(PLAIN)}, or a quantized "
                f"matrix, found {info.dtype} {list(info.shape)}"
            )
        return torch.from_numpy(self._matrix(info, roles))

    def _matrix(self, info: TensorInfo, roles: dict[Role, str]) -> np.ndarray:
        infos = {role: self.checkpoint.tensor_info(stored) for role, stored in roles.items()}
        pieces = {role: Piece(t, Span(t.file, t.offset, t.nbytes), t.shape) for role, t in infos.items()}
        rows, cols = info.shape[0], info.shape[1] * (2 if info.dtype in PACKED else 1)
        parts = Parts(pieces, rows, cols, rows, slice(None))
        spans = [piece.span for role, piece in pieces.items() if role != "input"]
        raw = dict(zip(spans, self._reader.read(spans), strict=True))
        module = detect(parts)
        module.check(parts)
        return dequantize(module.build(parts, raw), np.float32)
