"""2-bit experts without looking at any text: what a calibrated scheme's codebook makes of the weights alone."""

import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from moet.calibrate.codebooks import codebook_of
from moet.calibrate.device import Device
from moet.calibrate.encode import encode_matrix
from moet.calibrate.layer import Solved, groups
from moet.calibrate.rows import row_writer
from moet.calibrate.values import native_values
from moet.checkpoint import Checkpoint
from moet.models import MoeLayer
from moet.pack.encoder import Batch, Rounding
from moet.pack.manifest import Layer
from moet.pack.progress import Progress
from moet.quantize.schemes import Scheme


def rounded(
    checkpoint: Checkpoint, layer: MoeLayer, row_format: str, device: Device, pool: ThreadPoolExecutor
) -> Iterator[Batch]:
    """The experts of one layer, each matrix by itself."""
    codebook = codebook_of(row_format)
    for experts in groups(layer.experts, device.group(checkpoint, layer)):
        native = native_values(checkpoint, layer.index, experts, device.torch, pool)
        first, second = (encode_matrix(codebook, w) for w in (native.first, native.second))
        yield Batch(experts, row_writer(row_format, layer, Solved(experts, native, first, second)))


class RoundingEncoder(Rounding):
    """`Rounding` for row formats that `moet.quantize` does not write."""

    def __init__(self, scheme: Scheme, device: Device) -> None:
        self.scheme, self.row_format, self.device = scheme.name, scheme.row_format, device

    def begin(
        self, checkpoint: Checkpoint, root: Path, done: Mapping[int, Layer], progress: Progress
    ) -> None:
        self.checkpoint = checkpoint
        self._pool = ThreadPoolExecutor(len(os.sched_getaffinity(0)))

    def batches(self, layer: MoeLayer) -> Iterator[Batch]:
        with torch.no_grad():
            yield from rounded(self.checkpoint, layer, self.row_format, self.device, self._pool)
