"""All expert matrices of a model under one scheme, in memory."""

import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import torch
from codebooks import Encode, Scheme

from moet.calibrate.device import Device
from moet.calibrate.layer import groups
from moet.calibrate.step import open_layer
from moet.calibrate.stored import Streams
from moet.calibrate.values import Values, native_values
from moet.forward import Decoder


@dataclass
class Quantized:
    """experts: by layer, the values of all its experts. encode_seconds: in the encoder alone. seconds: in all.
    errors, squares: sums of (q - v)^2 and v^2; bias: by matrix, mean of (q - v) / rms v. outputs: relative output error by layer, on calibration text."""

    experts: dict[int, Values] = field(default_factory=dict)
    encode_seconds: float = 0.0
    seconds: float = 0.0
    weights: int = 0
    errors: float = 0.0
    squares: float = 0.0
    bias: list[float] = field(default_factory=list)
    outputs: dict[int, float] = field(default_factory=dict)

    def count(self, native: torch.Tensor, values: torch.Tensor) -> None:
        difference = (values - native).double()
        self.weights += native.numel()
        self.errors += float(difference.square().sum())
        self.squares += float(native.double().square().sum())
        rms = native.double().square().mean((1, 2)).sqrt()
        self.bias += (difference.mean((1, 2)) / rms.clamp(min=1e-300)).tolist()

    @property
    def relative_rms(self) -> float:
        return (self.errors / self.squares) ** 0.5

    @property
    def mean_absolute_bias(self) -> float:
        return sum(map(abs, self.bias)) / len(self.bias)


def timed(encode: Encode, into: Quantized, device: torch.device) -> Encode:
    def run(*args):
        sync(device)
        begin = time.perf_counter()
        codes = encode(*args)
        sync(device)
        into.encode_seconds += time.perf_counter() - begin
        return codes

    return run


def sync(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


@torch.no_grad()
def quantize(
    decoder: Decoder, scheme: Scheme, ids: torch.Tensor, device: Device, layers: set[int] | None = None
) -> Quantized:
    """ids: int64 [windows, length] to calibrate on. layers: those that are quantized; None: all."""
    checkpoint, out = decoder.checkpoint, Quantized()
    begin = time.perf_counter()
    encode = timed(scheme.encode, out, device.torch)
    down = timed(scheme.down or scheme.encode, out, device.torch)
    pool = ThreadPoolExecutor(len(os.sched_getaffinity(0)))
    moe = {layer.index: layer for layer in checkpoint.spec.layers}
    streams = None
    if scheme.calibrated:
        states = decoder.embed(ids).to(device.torch)
        streams = Streams(0, states, states)
    for index in range(max(moe) + 1):
        layer = moe.get(index)
        wanted = layer is not None and (layers is None or index in layers)
        if streams and wanted and index == decoder.mtp:
            full = decoder.mtp_input(streams.full)
            streams = Streams(index, full, full if streams.same else decoder.mtp_input(streams.quantized))
        elif streams and not wanted and index < decoder.layers:
            streams = plain_step(decoder, streams, index)
            continue
        if streams and index == streams.next:
            work, finish = open_layer(decoder, layer, streams)
            parts = []
            for solved in work.run(encode, device.group(checkpoint, layer), pool, down):
                out.count(solved.native.first, solved.first.values)
                out.count(solved.native.second, solved.second.values)
                parts.append((solved.first.values, solved.second.values))
            out.outputs[index] = sum(work.output_errors) / len(work.output_errors)
            if not layer.mtp:  # nothing comes after it
                streams = finish()
        elif wanted:
            parts = []
            for experts in groups(layer.experts, device.group(checkpoint, layer)):
                native = native_values(checkpoint, index, experts, device.torch, pool)
                first, second = encode(native.first), down(native.second)
                out.count(native.first, first.values)
                out.count(native.second, second.values)
                parts.append((first.values, second.values))
        else:
            continue
        out.experts[index] = Values(*(torch.cat(p) for p in zip(*parts, strict=True)))
    out.seconds = time.perf_counter() - begin
    return out


def plain_step(decoder: Decoder, streams: Streams, index: int) -> Streams:
    with decoder.layer(index) as module:
        full = decoder.run(module, streams.full, index)
        quantized = full if streams.same else decoder.run(module, streams.quantized, index)
    return Streams(index + 1, full, quantized)
