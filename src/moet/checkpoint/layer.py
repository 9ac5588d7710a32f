"""How to read one layer's experts: which byte ranges, in which format. Made from names and headers; no tensor
data is read for it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType

import numpy as np

from moet.checkpoint.formats import detect
from moet.checkpoint.names import LayerNames, Matrix3, Role
from moet.checkpoint.parts import Parts, Piece
from moet.checkpoint.reader import Reader, Span
from moet.checkpoint.safetensors import TensorInfo
from moet.checkpoint.weights import ExpertWeights
from moet.errors import CheckpointError
from moet.models import MoeLayer, Projections

MATRICES = ("gate", "up", "down")


@dataclass(frozen=True)
class LayerReader:
    """format: the native format of every matrix in the layer. scale_dtype: the checkpoint's dtype of their
    scales, "" for bf16.
    biased: they have biases. expert_bytes: stored bytes of one expert."""

    layer: MoeLayer
    format: str
    scale_dtype: str
    biased: bool
    expert_bytes: int
    _module: ModuleType
    _parts: Callable[[int, str], Parts]

    def read(self, expert: int, reader: Reader) -> ExpertWeights:
        """Raises CheckpointError if the file is truncated, or a scale is not finite."""
        parts = [self._parts(expert, matrix) for matrix in MATRICES]
        spans = list(dict.fromkeys(span for p in parts for span in _spans(p)))
        raw: Mapping[Span, np.ndarray] = dict(zip(spans, reader.read(spans), strict=True))
        gate, up, down = (self._module.build(p, raw) for p in parts)
        return ExpertWeights(self.layer.index, expert, gate, up, down)


def plan_layer(
    names: LayerNames, projections: Projections, hidden: int, info: Callable[[str], TensorInfo]
) -> LayerReader:
    """Raises CheckpointError: a shape or dtype that fits no known format, or two experts of different formats
    (it names both)."""
    layer = names.layer

    def parts_of(expert: int, matrix: str) -> Parts:
        rows, cols = (hidden, layer.inter) if matrix == "down" else (layer.inter, hidden)
        if not names.fused:
            return Parts(_single(names.parts[expert, matrix], info), rows, cols, rows, slice(None))
        stored, select = rows, slice(None)
        if matrix != "down":
            stored, half = 2 * rows, MATRICES.index(matrix)
            select = (
                slice(half, None, 2) if projections.interleaved else slice(half * rows, (half + 1) * rows)
            )
        key: Matrix3 = "down" if matrix == "down" else "gate_up"
        pieces = _slices(names.parts[-1, key], info, expert, layer.experts)
        return Parts(pieces, rows, cols, stored, select, transposed=projections.transposed)

    first, first_kind, module = "", "", None
    for expert in range(1 if names.fused else layer.experts):
        for matrix in MATRICES:
            parts = parts_of(expert, matrix)
            module = detect(parts)
            kind, name = module.check(parts), parts.pieces["codes"].info.name
            first, first_kind = first or name, first_kind or kind
            if kind != first_kind:
                raise parts.pieces["codes"].wrong(
                    f"one format in layer {layer.index}: {first_kind}, as {first} has", kind
                )
    size = sum(
        span.nbytes for span in {span for m in MATRICES for span in _spans(parts_of(0, m), all_roles=True)}
    )
    gate = parts_of(0, "gate")
    return LayerReader(layer, first_kind, gate.dtype("scale"), "bias" in gate.pieces, size, module, parts_of)


def _spans(parts: Parts, all_roles: bool = False) -> list[Span]:
    return [piece.span for role, piece in parts.pieces.items() if all_roles or role != "input"]


def _single(roles: Mapping[Role, str], info: Callable[[str], TensorInfo]) -> dict[Role, Piece]:
    pieces: dict[Role, Piece] = {}
    for role, name in roles.items():
        t = info(name)
        pieces[role] = Piece(t, Span(t.file, t.offset, t.nbytes), t.shape)
    return pieces


def _slices(
    roles: Mapping[Role, str], info: Callable[[str], TensorInfo], expert: int, experts: int
) -> dict[Role, Piece]:
    pieces: dict[Role, Piece] = {}
    for role, name in roles.items():
        t = info(name)
        if all(n == 1 for n in t.shape) and experts > 1:  # one scale for all experts
            pieces[role] = Piece(t, Span(t.file, t.offset, t.nbytes), ())
            continue
        if not t.shape or t.shape[0] != experts or t.nbytes % experts:
            raise CheckpointError(
                f"{t.file}, tensor {name}: expected {experts} experts as first dimension, "
                f"found {t.dtype} {list(t.shape)}"
            )
        size = t.nbytes // experts
        pieces[role] = Piece(t, Span(t.file, t.offset + expert * size, size), t.shape[1:])
    return pieces
