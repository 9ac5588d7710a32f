"""Calibrated encoding for `moet.pack`: layer after layer, each on what the layers before it, at 2 bits, really give."""

import functools
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch

from moet.calibrate import stored
from moet.calibrate.codebooks import codebook_of
from moet.calibrate.device import Device
from moet.calibrate.encode import encode_matrix
from moet.calibrate.rounding import rounded
from moet.calibrate.rows import row_writer
from moet.calibrate.step import open_layer
from moet.calibrate.stored import Streams
from moet.calibrate.tokens import Windows
from moet.calibrate.values import Values
from moet.checkpoint import Checkpoint
from moet.errors import CheckpointError, PackError
from moet.forward import Decoder
from moet.layout import RowGeometry, check_row, dequantize_row
from moet.models import MoeLayer
from moet.pack.encoder import Batch
from moet.pack.manifest import Calibration, Layer, LayerCalibration
from moet.pack.progress import Progress
from moet.quantize.schemes import Scheme


class CalibratedEncoder:
    """`moet.pack.encoder.Encoder` that looks at the data. Not for several threads."""

    def __init__(self, scheme: Scheme, windows: Windows, device: Device) -> None:
        self.scheme, self.row_format, self.windows, self.device = (
            scheme.name,
            scheme.row_format,
            windows,
            device,
        )
        self.encode = functools.partial(encode_matrix, codebook_of(scheme.row_format))
        count, length = windows.ids.shape
        self.calibration = Calibration(windows.digest, count * length, length)
        self._reports: dict[int, LayerCalibration] = {}

    def scratch_bytes(self, checkpoint: Checkpoint) -> int:
        """States of both networks, of two layers for a moment."""
        text = checkpoint.config.get("text_config") or checkpoint.config
        return 2 * 2 * 4 * self.windows.ids.numel() * checkpoint.spec.hidden * text.get("hc_mult", 1)

    def begin(
        self, checkpoint: Checkpoint, root: Path, done: Mapping[int, Layer], progress: Progress
    ) -> None:
        self.checkpoint, self.root, self.done, self.progress = checkpoint, root, dict(done), progress
        try:
            self._decoder = Decoder.open(checkpoint, device=self.device.name)
        except CheckpointError as e:
            raise CheckpointError(f"{e}. `--no-calibrate` needs no model to run") from None
        self._streams: Streams | None = None
        self._pool = ThreadPoolExecutor(len(os.sched_getaffinity(0)))
        self._inner = {layer.index: layer for layer in checkpoint.spec.layers if not layer.mtp}
        self._last = max(self._inner) if self._decoder.mtp is None else self._decoder.mtp

    def batches(self, layer: MoeLayer) -> Iterator[Batch]:
        with torch.no_grad():
            if layer.mtp and not self._runs(layer.index):
                yield from rounded(self.checkpoint, layer, self.row_format, self.device, self._pool)
            else:
                yield from self._calibrated(layer)

    def report(self, index: int) -> LayerCalibration | None:
        return self._reports.get(index)

    def written(self, layer: Layer) -> None:
        self.done[layer.index] = layer
        stored.forget(self.root, layer.index + 1)

    def holds(self, shard: str) -> bool:
        """Layers still to be run, and the embedding until states are on disk."""
        if self._last in self.done:
            return False
        at = max(stored.there(self.root), default=-1)
        return any(shard in self._decoder.shards(index) for index in range(at, self._last + 1))

    def _runs(self, index: int) -> bool:
        """Whether an MTP layer can be run: it is of the kind that moet knows, and a layer of the model takes its tensors."""
        if index != self._decoder.mtp:
            return False
        try:
            with self._decoder.layer(index, experts=False):
                return True
        except CheckpointError:
            return False

    def _calibrated(self, layer: MoeLayer) -> Iterator[Batch]:
        streams = self._before(layer.index)
        if layer.mtp:
            full = self._decoder.mtp_input(streams.full)
            quantized = full if streams.same else self._decoder.mtp_input(streams.quantized)
            streams = Streams(layer.index, full, quantized)
        self.progress.stage(f"layer {layer.index}; routing of {streams.full.ids.numel()} tokens")
        work, finish = open_layer(self._decoder, layer, streams)
        for solved in work.run(self.encode, self.device.group(self.checkpoint, layer), self._pool):
            self.progress.stage(
                f"layer {layer.index}; experts {solved.experts.start} to {solved.experts.stop - 1}"
            )
            yield Batch(solved.experts, row_writer(self.row_format, layer, solved))
        self._reports[layer.index] = LayerCalibration(
            *work.tokens, tuple(_short(x) for x in work.output_errors)
        )
        if not layer.mtp:  # nothing comes after it
            self._streams = finish()
            stored.write(self.root, self._streams)

    def _before(self, index: int) -> Streams:
        """The states before layer `index`: kept from the layer before, read, or computed again, where layers that an
        earlier run has finished take their 2-bit experts from its rows."""
        streams = self._streams
        if streams is None or streams.next > index:
            streams = self._nearest(index)
        for i in range(streams.next, index):
            self.progress.stage(f"layer {i}")
            if i in self._inner:
                layer = self._inner[i]
                work, finish = open_layer(self._decoder, layer, streams)
                work.replay(
                    self.device.group(self.checkpoint, layer),
                    self._pool,
                    lambda e, native, i=i: self._stored(i, e, native),
                )
                streams = finish()
                continue
            with self._decoder.layer(i) as module:
                full = self._decoder.run(module, streams.full, i)
                quantized = full if streams.same else self._decoder.run(module, streams.quantized, i)
            streams = Streams(i + 1, full, quantized)
        return streams

    def _nearest(self, index: int) -> Streams:
        for at in reversed([at for at in stored.there(self.root) if at <= index]):
            if found := stored.read(self.root, at, self.windows.ids):
                return found
        states = self._decoder.embed(self.windows.ids)
        return Streams(0, states, states)

    def _stored(self, index: int, experts: range, native: Values) -> Values:
        """2-bit experts out of a finished row file."""
        layer = self.done[index]
        geometry = RowGeometry(layer.base.format, self.checkpoint.spec.hidden, layer.inter, layer.biased)
        first, second = [], []
        for e in experts:
            offset = layer.base.data_offset + e * layer.base.row_bytes
            row = np.fromfile(self.root / layer.base.file, np.uint8, layer.base.row_bytes, offset=offset)
            if bad := check_row(geometry, row):
                path = self.root / layer.base.file
                raise PackError(
                    f"{path}, expert {e}: expected checksums that hold, found {bad[0]} damaged. Delete the file and run the "
                    "same command again, which makes it again"
                )
            gate, up, down = dequantize_row(geometry, row)
            first.append(torch.from_numpy(np.concatenate([gate, up])))
            second.append(torch.from_numpy(down))
        device = self.device.name
        return Values(
            torch.stack(first).to(device), torch.stack(second).to(device), native.bias, native.out_bias
        )


def _short(x: float) -> float:
    return float(f"{x:.5g}")
