"""A run: its time budget, its progress on stdout, and its result file, which is written anew after every part, so that a run that is stopped leaves what it measured."""

import argparse
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1])]

import record


class Report:
    """mode: of the result file. seconds: the budget; `left` says what remains of it. commit: of the sources, where there is no git to ask."""

    def __init__(self, out: Path, mode: str, seconds: float, commit: str = "") -> None:
        self.out, self.mode, self._start, self._seconds = out, mode, time.monotonic(), seconds
        self._commit = {"commit": commit} if commit else {}
        self.claims: list[record.Claim] = []
        self.samples: dict[str, Any] = {}
        self.facts: dict[str, Any] = {"skipped": []}
        self.times: dict[str, float] = {}
        self._gpu = gpu()

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self._start

    @property
    def left(self) -> float:
        return self._seconds - self.elapsed

    def say(self, *what: object) -> None:
        print(f"[{self.elapsed:6.1f} s]", *what, flush=True)

    def fits(self, part: str, seconds: float) -> bool:
        """Whether a part that takes about so long still fits; what does not is named in the result."""
        if self.left >= seconds:
            return True
        self.facts["skipped"].append(part)
        self.say(f"{part}: skipped, {self.left:.0f} s left of the budget and it takes about {seconds:.0f}")
        return False

    def timed(self, part: str) -> "_Timed":
        """Context manager: seconds of a part, in `times` and on stdout."""
        return _Timed(self, part)

    def write(self) -> None:
        more = {"times_s": {k: round(v, 3) for k, v in self.times.items()}, **self.facts, **self._gpu, **self._commit}
        record.write(self.out, self.claims, self.samples, self.mode, **more)

    def finish(self) -> None:
        self.write()
        for c in self.claims:
            held = {True: "holds", False: "DOES NOT HOLD", None: ""}[c.held]
            self.say(f"{c.id:4} {c.what}: {c.value:g} {c.unit} {'' if c.target is None else f'({c.sense} {c.target:g})'} {held}")
        self.say("written:", self.out)


class _Timed:
    def __init__(self, report: Report, part: str) -> None:
        self._report, self._part = report, part

    def __enter__(self) -> None:
        self._start = time.perf_counter()

    def __exit__(self, kind: object, *rest: object) -> None:
        if kind is None:
            self._report.times[self._part] = seconds = time.perf_counter() - self._start
            self._report.say(f"{self._part}: {seconds:.2f} s")


def gpu() -> dict[str, Any]:
    """Name, memory and driver of the first GPU, without starting CUDA in this process; empty without one."""
    import torch

    command = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    except (OSError, subprocess.CalledProcessError):
        return {}
    name, memory, driver = lines[0].split(", ")
    return {"gpu": {"name": name, "memory": memory, "driver": driver, "cuda": torch.version.cuda}}


def arguments(description: str | None, seconds: float) -> argparse.ArgumentParser:
    """Parser with what every program here takes: --out, --seconds, --format, --tiny, --commit."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the result files")
    parser.add_argument("--seconds", type=float, default=seconds, help="stop cleanly after so long; parts that do not fit are named in the result")
    parser.add_argument("--format", choices=("tcq2", "sym2"), default="tcq2", help="of the rows")
    parser.add_argument("--tiny", action="store_true", help="a few small layers and few steps: tries the program, measures nothing")
    parser.add_argument("--commit", default="", help="of the sources, where there is no git to ask")
    return parser
