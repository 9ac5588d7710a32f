"""Calibrated encoding for `moet.pack`: layer after layer, each on what the layers before it, at 2 bits, really give."""

import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from moet.calibrate import stored
from moet.calibrate.layer import LayerWork, Solved, Solver, group_size
from moet.calibrate.plain import Codes
from moet.calibrate.routing import answered, record
from moet.calibrate.stored import Streams
from moet.calibrate.tokens import Windows
from moet.calibrate.values import Values, native_values
from moet.checkpoint import Checkpoint, ExpertWeights
from moet.errors import ConfigError
from moet.forward import Decoder
from moet.layout import RowGeometry, dequantize_row, pack_row
from moet.layout.planes import Sym2Matrix
from moet.models import MoeLayer
from moet.pack.encoder import Batch
from moet.pack.manifest import Calibration, Layer, LayerCalibration
from moet.pack.progress import Progress
from moet.quantize import MatrixReport, RowReport
from moet.quantize.report import matrix_report

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
    """`moet.pack.encoder.Encoder` with a solver that looks at the data. Not for several threads."""

    row_format = "sym2"

    def __init__(self, scheme: str, solver: Solver, windows: Windows, device: Device) -> None:
        self.scheme, self.solver, self.windows, self.device = scheme, solver, windows, device
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
        for solved in work.run(self.solver, self._group(layer), self._pool):
            self.progress.stage(
                f"layer {layer.index}; experts {solved.experts.start} to {solved.experts.stop - 1}"
            )
            yield Batch(solved.experts, _row_writer(layer, solved))
        self._reports[layer.index] = LayerCalibration(
            *work.tokens, tuple(_short(x) for x in work.output_errors)
        )
        self._streams = finish()
        stored.write(self.root, self._streams)

    def _rounded(self, layer: MoeLayer) -> Iterator[Batch]:
        """An MTP layer: transformers' models do not have it, so there is nothing to run. Without statistics the solver
        rounds."""
        group = self._group(layer)
        for begin in range(0, layer.experts, group):
            experts = range(begin, min(begin + group, layer.experts))
            native = native_values(
                self.checkpoint, layer.index, experts, torch.device(self.device.name), self._pool
            )
            first, second = (self.solver(w, _identity(w), None) for w in (native.first, native.second))
            yield Batch(experts, _row_writer(layer, Solved(experts, native, first, second)))

    def _open(self, layer: MoeLayer, streams: Streams) -> tuple[LayerWork, Callable[[], Streams]]:
        """The layer's work, and what gives the states after it once that is done."""
        decoder, index = self._decoder, layer.index
        self.progress.stage(f"layer {index}; routing of {streams.full.ids.numel()} tokens")
        with decoder.layer(index, experts=False) as module:
            full = record(decoder, module, streams.full, index, layer.experts)
            quantized = (
                full if streams.same else record(decoder, module, streams.quantized, index, layer.experts)
            )
        work = LayerWork(self.checkpoint, layer, self.checkpoint.spec.activation, full, quantized)

        def finish() -> Streams:
            with decoder.layer(index, experts=False) as module:
                return Streams(
                    index + 1,
                    answered(decoder, module, streams.full, index, work.full_answer),
                    answered(decoder, module, streams.quantized, index, work.quantized_answer),
                )

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


def _identity(weight: torch.Tensor) -> torch.Tensor:
    count, _, columns = weight.shape
    return torch.eye(columns, device=weight.device).expand(count, -1, -1)


def _row_writer(layer: MoeLayer, solved: Solved) -> Callable[[ExpertWeights, np.ndarray], RowReport]:
    """Writes base rows of a group's experts."""
    first, second = (_on_cpu(c) for c in (solved.first, solved.second))
    reports = {
        "gate": _reports(solved.native.first[:, : layer.inter], solved.first, slice(0, layer.inter)),
        "up": _reports(solved.native.first[:, layer.inter :], solved.first, slice(layer.inter, None)),
        "down": _reports(solved.native.second, solved.second, slice(None)),
    }

    def write(weights: ExpertWeights, out: np.ndarray) -> RowReport:
        g = weights.expert - solved.experts.start
        hidden, inter, biased = weights.gate.cols, weights.gate.rows, weights.gate.bias is not None
        both, down = _packed(first, g), _packed(second, g)
        matrices = (
            Sym2Matrix(inter, hidden, both[0][:inter], both[1][:inter], weights.gate.bias),
            Sym2Matrix(inter, hidden, both[0][inter:], both[1][inter:], weights.up.bias),
            Sym2Matrix(hidden, inter, *down, weights.down.bias),
        )
        pack_row(RowGeometry("sym2", hidden, inter, biased), *matrices, out)
        return RowReport(*(reports[name][g] for name in ("gate", "up", "down")))

    return write


def _on_cpu(codes: Codes) -> tuple[np.ndarray, np.ndarray]:
    """Codes four to a byte, and scales."""
    c = codes.codes
    c = torch.nn.functional.pad(c, (0, -c.shape[2] % 4)).reshape(*c.shape[:2], -1, 4).int()
    packed = c[..., 0] | c[..., 1] << 2 | c[..., 2] << 4 | c[..., 3] << 6
    return packed.to(torch.uint8).cpu().numpy(), codes.scales.cpu().numpy()


def _packed(arrays: tuple[np.ndarray, np.ndarray], g: int) -> tuple[np.ndarray, np.ndarray]:
    return arrays[0][g], arrays[1][g]


def _reports(native: torch.Tensor, codes: Codes, rows: slice) -> list[MatrixReport]:
    """By expert, as `moet.quantize` counts for its own rows; sums in float64."""
    values, scales = codes.values[:, rows], codes.scales[:, rows]
    unit = torch.exp2(scales.float() - 127).repeat_interleave(32, dim=2)[:, :, : values.shape[2]]
    found = []
    for v, q, u in zip(native, values, unit, strict=True):
        error = (q - v).double()
        inner = error / u
        zeros = v == 0
        sums = (v.double().square().sum(), error.square().sum(), inner.sum(), inner.square().sum())
        counts = (v.numel(), int(zeros.sum()), int((zeros & torch.signbit(v)).sum()))
        found.append(matrix_report(*counts, 0, tuple(float(x) for x in sums)))
    return found


def _short(x: float) -> float:
    return float(f"{x:.5g}")
