"""What the packer asks of whoever encodes base rows, and the encoder that looks at the weights alone."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from moet.checkpoint import Checkpoint, ExpertWeights
from moet.layout import RowGeometry
from moet.models import MoeLayer
from moet.pack.manifest import Calibration, Layer, LayerCalibration
from moet.pack.progress import Progress
from moet.quantize import RowReport, encode_row
from moet.quantize.schemes import PLAIN_SCHEME

EncodeExpert = Callable[[ExpertWeights, np.ndarray], RowReport]
"""Writes the base row of one expert into uint8 [row_bytes], every byte of it. Called by several threads at once."""


@dataclass(frozen=True)
class Batch:
    """Experts of a layer whose rows can be written now."""

    experts: range
    encode: EncodeExpert


class Encoder(Protocol):
    """One for a run. `scratch_bytes` and `begin` come first; then, in ascending order, for every layer that has no rows yet, `batches`
    until it ends, `report`, and `written`.

    scheme       its name in the pack
    row_format   of the base rows: an entry of moet.layout.FORMATS
    calibration  what it looks at besides the weights; None: nothing
    """

    scheme: str
    row_format: str
    calibration: Calibration | None

    def scratch_bytes(self, checkpoint: Checkpoint) -> int:
        """The most that the encoder keeps under the pack's `.moet` at a time."""
        ...

    def begin(
        self, checkpoint: Checkpoint, root: Path, done: Mapping[int, Layer], progress: Progress
    ) -> None:
        """root: the pack's folder, under whose `.moet` the encoder may keep what it needs to go on after a kill. done:
        layers whose rows an earlier run has written."""
        ...

    def batches(self, layer: MoeLayer) -> Iterator[Batch]:
        """All experts of the layer, ascending. The next batch is asked for when the rows of one are written; what is
        needed after a kill is durable when the iterator ends."""
        ...

    def report(self, index: int) -> LayerCalibration | None:
        """Of a layer whose batches have ended."""
        ...

    def written(self, layer: Layer) -> None:
        """The layer's rows are durable."""
        ...

    def holds(self, shard: str) -> bool:
        """Whether dense tensors of the shard will still be read."""
        ...


class Rounding:
    """Each weight by itself (docs/quantization.md)."""

    scheme = PLAIN_SCHEME
    row_format = "sym2"
    calibration = None

    def scratch_bytes(self, checkpoint: Checkpoint) -> int:
        return 0

    def begin(
        self, checkpoint: Checkpoint, root: Path, done: Mapping[int, Layer], progress: Progress
    ) -> None:
        pass

    def batches(self, layer: MoeLayer) -> Iterator[Batch]:
        yield Batch(range(layer.experts), encode_expert)

    def report(self, index: int) -> LayerCalibration | None:
        return None

    def written(self, layer: Layer) -> None:
        pass

    def holds(self, shard: str) -> bool:
        return False


def encode_expert(weights: ExpertWeights, out: np.ndarray) -> RowReport:
    """The row that `Rounding` gives."""
    hidden, inter, biased = weights.gate.cols, weights.gate.rows, weights.gate.bias is not None
    return encode_row(RowGeometry("sym2", hidden, inter, biased), weights, out)
