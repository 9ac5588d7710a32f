"""Calibrated encoding for `moet.pack`: layer after layer, each on what the layers before it, at 2 bits, really give."""

import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from moet.calibrate import stored
from moet.calibrate.codebooks import codebook_of
from moet.calibrate.encode import encode_matrix
from moet.calibrate.layer import LayerWork, Solved, group_size
from moet.calibrate.routing import adds, answered, record
from moet.calibrate.rows import row_writer
from moet.calibrate.stored import Streams
from moet.calibrate.tokens import Windows
from moet.calibrate.values import Values, native_values
from moet.checkpoint import Checkpoint
from moet.errors import ConfigError
from moet.forward import Decoder, States
from moet.layout import RowGeometry, dequantize_row
from moet.models import MoeLayer
from moet.pack.encoder import Batch
from moet.pack.manifest import Calibration, Layer, LayerCalibration
from moet.pack.progress import Progress
from moet.quantize.schemes import Scheme

BUDGET = {"cpu": 2 << 30, "cuda": 9 << 30}
"""Bytes for the experts that are encoded together."""


@dataclass(frozen=True)
class Device:
    """Where calibration computes, in float32."""

    name: str

    @classmethod
    def chosen(cls, name: str) -> "Device":
        """name: "cpu", "cuda", "cuda:1"..., or "auto". Raises ConfigError if there is no such device."""
        name = ("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name
        try:
            torch.empty(0, device=name)
            known = torch.device(name).type in BUDGET
        except (RuntimeError, AssertionError):
            known = False
        if not known:
            raise ConfigError(f"device: expected cpu, or cuda where torch finds a GPU, found {name}")
        return cls(name)


class CalibratedEncoder:
    """`moet.pack.encoder.Encoder` that looks at the data. Not for several threads."""

    def __init__(self, scheme: Scheme, windows: Windows, device: Device) -> None:
        self.scheme, self.row_format, self.windows, self.device = scheme.name, scheme.row_format, windows, device
        self.codebook = codebook_of(scheme.row_format)
        count, length = windows.ids.shape
        self.calibration = Calibration(windows.digest, count * length, length)
        self._reports: dict[int, LayerCalibration] = {}

    def begin(
        self, checkpoint: Checkpoint, root: Path, done: Mapping[int, Layer], progress: Progress
    ) -> None:
        self.checkpoint, self.root, self.done, self.progress = checkpoint, root, dict(done), progress
        self._decoder = Decoder.open(checkpoint, device=self.device.name)
        self._streams: Streams | None = None
        self._pool = ThreadPoolExecutor(len(os.sched_getaffinity(0)))
        self._inner = {layer.index: layer for layer in checkpoint.spec.layers if not layer.mtp}

    def batches(self, layer: MoeLayer) -> Iterator[Batch]:
        with torch.no_grad():
            yield from self._rounded(layer) if layer.mtp else self._calibrated(layer)

    def report(self, index: int) -> LayerCalibration | None:
        return self._reports.get(index)

    def written(self, layer: Layer) -> None:
        self.done[layer.index] = layer
        stored.forget(self.root, layer.index + 1)

    def holds(self, shard: str) -> bool:
        """Layers still to be run, and the embedding until states are on disk."""
        last = max(self._inner)
        if all(index in self.done for index in self._inner):
            return False
        at = max(stored.there(self.root), default=-1)
        return any(shard in self._decoder.shards(index) for index in range(at, last + 1))

    def _group(self, layer: MoeLayer) -> int:
        budget = BUDGET[torch.device(self.device.name).type]
        return group_size(self.checkpoint.spec.hidden, layer.inter, layer.experts, budget)

    def _calibrated(self, layer: MoeLayer) -> Iterator[Batch]:
        streams = self._before(layer.index)
        work, finish = self._open(layer, streams)
        for solved in work.run(self.codebook, self._group(layer), self._pool):
            self.progress.stage(
                f"layer {layer.index}; experts {solved.experts.start} to {solved.experts.stop - 1}"
            )
            yield Batch(solved.experts, row_writer(self.row_format, layer, solved))
        self._reports[layer.index] = LayerCalibration(
            *work.tokens, tuple(_short(x) for x in work.output_errors)
        )
        self._streams = finish()
        stored.write(self.root, self._streams)

    def _rounded(self, layer: MoeLayer) -> Iterator[Batch]:
        """An MTP layer: transformers' models do not have it, so there is nothing to run. Its matrices are
        encoded by themselves."""
        group = self._group(layer)
        for begin in range(0, layer.experts, group):
            experts = range(begin, min(begin + group, layer.experts))
            native = native_values(
                self.checkpoint, layer.index, experts, torch.device(self.device.name), self._pool
            )
            first, second = (encode_matrix(self.codebook, w) for w in (native.first, native.second))
            yield Batch(experts, row_writer(self.row_format, layer, Solved(experts, native, first, second)))

    def _open(self, layer: MoeLayer, streams: Streams) -> tuple[LayerWork, Callable[[], Streams]]:
        """The layer's work, and what gives the states after it once that is done."""
        decoder, index = self._decoder, layer.index
        self.progress.stage(f"layer {index}; routing of {streams.full.ids.numel()} tokens")
        with decoder.layer(index, experts=False) as module:
            full, rest = record(decoder, module, streams.full, index, layer.experts)
            quantized, quantized_rest = full, rest
            adding = adds(decoder, module, streams.full, index)
            if not streams.same:
                quantized, quantized_rest = record(decoder, module, streams.quantized, index, layer.experts)
        missing = None
        if adding and not streams.same:
            difference = rest.hidden.float() - quantized_rest.hidden.float()
            missing = difference.flatten(0, 1).to(full.inputs.device)
        work = LayerWork(
            self.checkpoint, layer, self.checkpoint.spec.activation, full, quantized, missing
        )

        def finish() -> Streams:
            answers = (work.full_answer, work.quantized_answer)
            if adding:
                return Streams(index + 1, *map(_plus, (rest, quantized_rest), answers))
            with decoder.layer(index, experts=False) as module:
                before = (streams.full, streams.quantized)
                after = (answered(decoder, module, s, index, a) for s, a in zip(before, answers, strict=True))
                return Streams(index + 1, *after)

        return work, finish

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
                work, finish = self._open(layer, streams)
                work.replay(self._group(layer), self._pool, lambda e, native, i=i: self._stored(i, e, native))
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
            gate, up, down = dequantize_row(geometry, row)
            first.append(torch.from_numpy(np.concatenate([gate, up])))
            second.append(torch.from_numpy(down))
        device = self.device.name
        return Values(
            torch.stack(first).to(device), torch.stack(second).to(device), native.bias, native.out_bias
        )


def _plus(rest: States, answer: torch.Tensor) -> States:
    hidden = rest.hidden + answer.view(rest.hidden.shape).to(rest.hidden)
    return States(rest.ids, hidden, rest.carry)


def _short(x: float) -> float:
    return float(f"{x:.5g}")
