"""Calibrated encoding of one layer at a real model's dimensions, with random weights and activations, stage by stage.

    python benchmarks/calibrate_one_layer.py --model glm-5.2 --device cuda --out docs/results/calibrate-glm-5.2.json
    python benchmarks/calibrate_one_layer.py --model glm-5.2 --scale 8 --tokens 2048      # a small machine

With `--experts N` only the first N experts are encoded and all that goes by expert is multiplied up.
"""

import argparse
import collections
import contextlib
import dataclasses
import functools
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import numpy as np
import record as results
import torch
from synthetic_layer import MODELS, SyntheticCheckpoint

from moet import native
from moet.calibrate import TOKENS, estimate
from moet.calibrate import encode as solver
from moet.calibrate.codebooks import codebook_of
from moet.calibrate.device import Device
from moet.calibrate.layer import LayerWork
from moet.calibrate.routing import adds, answered, record
from moet.calibrate.rows import row_writer
from moet.errors import MoetError
from moet.forward import Decoder, States
from moet.layout import RowGeometry, pack_row
from moet.quantize.schemes import DEFAULT_SCHEME, scheme

BY_EXPERT = ("natives", "statistics of gate and up", "statistics of down", "encode gate and up", "encode down", "answers", "rows")
TARGET_HOURS = 24
"""A model of 753B parameters has to pack in hours."""


class Stages:
    """Seconds by stage; the device is waited for at both ends of each."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.seconds = device, collections.defaultdict(float)

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        self._wait()
        start = time.perf_counter()
        yield
        self._wait()
        self.seconds[name] += time.perf_counter() - start

    def timed(self, name: str, function):
        @functools.wraps(function)
        def call(*arguments, **named):
            with self(name):
                return function(*arguments, **named)

        return call

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


class TimedWork(LayerWork):
    """A layer whose stages are timed."""

    def watch(self, stages: Stages) -> None:
        self._native = stages.timed("natives", self._native)
        self._first_moments = stages.timed("statistics of gate and up", self._first_moments)
        self._second_moments = stages.timed("statistics of down", self._second_moments)
        for name in ("_native_answers", "_hidden", "_answer"):
            setattr(self, name, stages.timed("answers", getattr(self, name)))


def states_before(decoder: Decoder, index: int, tokens: int, window: int) -> States:
    """Of random tokens, through the layers before."""
    ids = torch.from_numpy(np.random.default_rng(0).integers(0, 1024, (tokens // window, window)))
    states = decoder.embed(ids)
    for i in range(index):
        with decoder.layer(i, experts=False) as module:
            outputs = torch.zeros(ids.numel(), decoder.checkpoint.spec.hidden, device=decoder.device)
            sparse = any(layer.index == i for layer in decoder.checkpoint.spec.layers)
            states = answered(decoder, module, states, i, outputs) if sparse else decoder.run(module, states, i)
    return states


def nudged(states: States) -> States:
    """The other network: the same states, a hundredth off."""
    noise = torch.randn(states.hidden.shape, generator=torch.Generator().manual_seed(0))
    return dataclasses.replace(states, hidden=states.hidden + 0.01 * states.hidden.std() * noise)


def write_rows(stages: Stages, checkpoint: SyntheticCheckpoint, row_format: str, solved) -> bool:
    """Base and native rows into memory; False if the native library is not there."""
    layer = checkpoint.spec.layers[-1]
    try:
        native.lib()
    except MoetError:
        return False
    with stages("rows"):
        write = row_writer(row_format, layer, solved)
        geometry = RowGeometry(row_format, checkpoint.spec.hidden, layer.inter, False)
        source = RowGeometry(checkpoint.format, checkpoint.spec.hidden, layer.inter, False)
        base, whole = np.zeros(geometry.row_bytes, np.uint8), np.zeros(source.row_bytes, np.uint8)
        for e in solved.experts:
            weights = checkpoint.expert(layer.index, e)
            write(weights, base)
            pack_row(source, weights.gate, weights.up, weights.down, whole)
    return True


def measure(checkpoint: SyntheticCheckpoint, device: Device, name: str, tokens: int, window: int, experts: int) -> dict:
    """Seconds by stage of the whole layer, and what was seen on the way."""
    stages, layer, wanted = Stages(device.torch), checkpoint.spec.layers[-1], scheme(name)
    decoder = Decoder.open(checkpoint, device=device.name)
    full = states_before(decoder, layer.index, tokens, window)
    quantized = nudged(full)
    if device.torch.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    with decoder.layer(layer.index, experts=False) as module, stages("other parts"):
        first, rest = record(decoder, module, full, layer.index, layer.experts)
        second, quantized_rest = record(decoder, module, quantized, layer.index, layer.experts)
        adding = adds(decoder, module, full, layer.index)
    missing = (rest.hidden - quantized_rest.hidden).flatten(0, 1).to(device.torch) if adding else None
    some = dataclasses.replace(layer, experts=experts)
    work = TimedWork(checkpoint, some, checkpoint.spec.activation, first, second, missing)
    work.watch(stages)
    encode = functools.partial(solver.encode_matrix, codebook_of(wanted.row_format))
    group = min(experts, device.group(checkpoint, layer))
    with_rows = True
    inside = Stages(device.torch)
    with contextlib.ExitStack() as stack:
        for part in ("feedback", "fitted"):
            timed = inside.timed(part, getattr(solver, part))
            stack.enter_context(mock.patch.object(solver, part, timed))
        pool = stack.enter_context(ThreadPoolExecutor())
        run = work.run(
            stages.timed("encode gate and up", encode), group, pool, stages.timed("encode down", encode)
        )
        start = time.perf_counter()
        for solved in run:
            with_rows = write_rows(stages, checkpoint, wanted.row_format, solved) and with_rows
            done = solved.experts.stop
            print(f"{done} of {experts} experts, {time.perf_counter() - start:.1f} s", flush=True)
        total = time.perf_counter() - start
        stages.seconds["shared statistics and rest"] = max(0.0, total - sum(stages.seconds[s] for s in BY_EXPERT))
    if not adding:
        with decoder.layer(layer.index, experts=False) as module, stages("other parts"):
            for states, answer in ((full, work.full_answer), (quantized, work.quantized_answer)):
                answered(decoder, module, states, layer.index, answer)
    share = layer.experts / experts
    seconds = {s: round(t * (share if s in BY_EXPERT else 1), 3) for s, t in stages.seconds.items()}
    factors = {s: round(t * share, 3) for s, t in inside.seconds.items()}
    peak = torch.cuda.max_memory_allocated() if device.torch.type == "cuda" else 0
    return {
        "seconds": seconds, "factors_seconds": factors, "experts_measured": experts, "experts": layer.experts, "group": group, "adds": adding,
        "rows_timed": with_rows, "peak_device_bytes": peak,
        "output_error": round(float(np.mean(work.output_errors)), 4), "measured_seconds": round(total, 3),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="glm-5.2")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--scheme", default=DEFAULT_SCHEME)
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--window", type=int, default=1024)
    parser.add_argument("--experts", type=int, default=0, help="how many are encoded; 0: all")
    parser.add_argument("--scale", type=int, default=1, help="divides the dimensions")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    device = Device.chosen(arguments.device)
    checkpoint = SyntheticCheckpoint(arguments.model, arguments.scale)
    layer = checkpoint.spec.layers[-1]
    with torch.no_grad():
        found = measure(
            checkpoint, device, arguments.scheme, arguments.tokens, arguments.window, arguments.experts or layer.experts
        )
    seconds = sum(found["seconds"].values())
    layers = (estimate.GLM_5_2 if arguments.model == "glm-5.2" else estimate.V4_FLASH).layers
    part = f" ({found['experts_measured']} timed, multiplied up)" if found["experts_measured"] < layer.experts else ""
    what = f"{arguments.model}: one layer of {layer.experts} experts, calibrated and encoded{part}"
    claims = [
        results.Claim(f"calibrate-{arguments.model}-layer", what, round(seconds, 1), "s"),
        results.Claim(
            f"calibrate-{arguments.model}-hours", f"{arguments.model}: {layers} such layers", round(layers * seconds / 3600, 2), "h",
            TARGET_HOURS if arguments.scale == 1 else None, "<=",
        ),
    ]  # fmt: skip
    sizes = {"hidden": checkpoint.spec.hidden, "inter": layer.inter, "other_weights": checkpoint.other_weights}
    gpu = torch.cuda.get_device_name(device.torch) if device.torch.type == "cuda" else ""
    written = results.write(
        arguments.out, claims, found, arguments.scheme,
        shape=sizes | {"tokens": arguments.tokens, "window": arguments.window, "scale": arguments.scale},
        device=gpu or "cpu",
    )  # fmt: skip
    for stage, value in sorted(found["seconds"].items(), key=lambda x: -x[1]):
        print(f"{stage:28} {value:9.2f} s")
    for stage, value in found["factors_seconds"].items():
        print(f"of encoding, {stage:15} {value:9.2f} s")
    for claim in written["claims"]:
        print(f"{claim['what']}: {claim['value']:.2f} {claim['unit']}")


if __name__ == "__main__":
    main()
