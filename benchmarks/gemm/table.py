"""Runs the table, cell by cell. A column that fails keeps the others running; its error's text is part of the result."""

import faulthandler
import gc
import math
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch

from gemm import bounds, inputs, reference, timing
from gemm.bounds import Ceilings
from gemm.column import Column
from gemm.columns import KINDS, Kind, columns_of
from gemm.shapes import Shape

CHECKED = 4
"""Tokens of a batch that are compared with the reference."""
PART_S = 4.0
"""A column of a shape takes about so long, its weights and compilation included."""
LIMIT_S = 120.0
"""If one takes longer, a kernel hangs: the process ends, with what was written before."""


def describe(error: BaseException) -> str:
    """Type and message, and where it was raised."""
    where = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {str(error)[:600]} ({where.filename.rsplit('/', 1)[-1]}:{where.lineno})"


def check_batches(tokens: Sequence[int]) -> list[int]:
    """Of those that are timed: the second smallest, and the largest up to 1024, which takes the path of prefill."""
    ordered = sorted(tokens)
    return sorted({ordered[min(1, len(ordered) - 1)], max((t for t in ordered if t <= 1024), default=ordered[0])})


def check(column: Column, shape: Shape, device: torch.device, tokens: int) -> float | None:
    """Relative error of the first tokens of a batch, the largest over the copies; None without a reference."""
    worst = 0.0
    batch = inputs.make(shape, tokens, column.copies, device, seed=77)
    for copy in range(column.copies):
        x, weights, ids = batch.x[copy], batch.weights[copy], batch.ids[copy]
        found = column(copy, x, weights, ids)[:CHECKED]
        wanted = column.reference(copy, x[:CHECKED], weights[:CHECKED], ids[:CHECKED])
        if wanted is None:
            return None
        error = reference.relative_error(found, wanted)
        worst = error if math.isnan(error) else max(worst, error)
    return worst


class ContextLost(Exception):
    """The process can use the GPU no more; the column that did it is among the errors."""


class Table:
    """cells[shape][tokens][column]: what `cell` makes. errors[shape]: "column" or "column xTOKENS" -> of what did not run. checks[shape][column][tokens]: relative errors,
    and `tolerance`. What is in there already is not run again.

    fits(part, seconds) says whether there is time for a part; say prints; save writes what there is.
    """

    def __init__(
        self, ceilings: Ceilings, device: torch.device, fits: Callable[[str, float], bool], say: Callable[..., None], save: Callable[[], None]
    ) -> None:  # fmt: skip
        self.ceilings, self.device, self.fits, self.say, self.save = ceilings, device, fits, say, save
        self.cells: dict[str, dict[str, dict[str, Any]]] = {}
        self.errors: dict[str, dict[str, str]] = {}
        self.checks: dict[str, dict[str, dict[str, float | None]]] = {}
        self.notes: dict[str, dict[str, Any]] = {}

    def lacks(self, shape: Shape, tokens: Sequence[int], kind: Kind) -> list[int]:
        """Batches that neither have a cell nor failed."""
        cells, errors = self.cells.get(shape.name, {}), self.errors.get(shape.name, {})
        if kind.name in errors:
            return []
        return [t for t in tokens if kind.name not in cells.get(str(t), {}) and f"{kind.name} x{t}" not in errors]

    def forget(self, column: str) -> None:
        """As if it had never run."""
        rows = [row for cells in self.cells.values() for row in cells.values()]
        for found in (*rows, *self.errors.values(), *self.checks.values(), *self.notes.values()):
            for name in [n for n in found if n.split(" ")[0] == column]:
                del found[name]

    def run(self, shape: Shape, tokens: Sequence[int], kinds: Sequence[Kind], samples: int) -> None:
        """Raises ContextLost."""
        batches = {t: inputs.make(shape, t, 2, self.device) for t in tokens}
        for kind in kinds:
            lacking = self.lacks(shape, tokens, kind)
            if lacking and self.fits(f"{shape.name} {kind.name}", PART_S):
                try:
                    self._column(shape, kind, {t: batches[t] for t in lacking}, samples)
                finally:
                    self.save()

    def _still_there(self, after: str) -> None:
        try:
            if self.device.type == "cuda":
                torch.cuda.synchronize()
        except RuntimeError as error:
            raise ContextLost(f"{after}: {describe(error)}") from error

    def _failed(self, shape: Shape, what: str, error: Exception) -> None:
        """Raises ContextLost if nothing can run after this."""
        self.errors.setdefault(shape.name, {})[what] = describe(error)
        self.say(f"{shape.name} {what}: FAILED {describe(error)}")
        self._still_there(f"{shape.name} {what}")

    def _column(self, shape: Shape, kind: Kind, batches: dict[int, inputs.Inputs], samples: int) -> None:
        column = None
        faulthandler.dump_traceback_later(LIMIT_S, exit=True)
        try:
            column = kind.make(shape, self.device, tuple(batches))
            timing.warm_up(column, list(batches.values()))
            checks = {str(t): check(column, shape, self.device, t) for t in check_batches(list(batches))}
            self.checks.setdefault(shape.name, {})[kind.name] = {**checks, "tolerance": column.tolerance}
            self.notes.setdefault(shape.name, {})[kind.name] = column.notes
            self.say(f"{shape.name} {kind.name}: errors {checks}")
            for batch in batches.values():
                self._cell(column, kind, shape, batch, samples)
        except ContextLost:
            raise
        except Exception as error:   # noqa: BLE001 (that a column does not run here is a result too)
            self._failed(shape, kind.name, error)
        finally:
            self._close(column)
            faulthandler.cancel_dump_traceback_later()

    def _cell(self, column: Column, kind: Kind, shape: Shape, batch: inputs.Inputs, samples: int) -> None:
        try:
            cell = self.cell(column, kind, shape, batch, samples)
        except Exception as error:   # noqa: BLE001
            return self._failed(shape, f"{kind.name} x{batch.tokens}", error)
        self.cells.setdefault(shape.name, {}).setdefault(str(batch.tokens), {})[kind.name] = cell
        self.say(f"{shape.name} {kind.name} x{batch.tokens}: {cell['us']:.1f} us, bound {cell['bound_us']:.1f}, {cell['tflops']:.0f} TFLOP/s")

    def _close(self, column: Column | None) -> None:
        """Also after an error that left the GPU unusable, which `_still_there` finds."""
        try:
            if column is not None:
                column.close()
            gc.collect()
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
        except RuntimeError as error:
            self.say(f"closing: {describe(error)}")

    def cell(self, column: Column, kind: Kind, shape: Shape, batch: inputs.Inputs, samples: int) -> dict[str, Any]:
        """us: median microseconds of a call; of ours also without the launch that begins a layer. fraction: bound / time."""
        times = timing.timed(column, column.copies, batch, samples)
        least = bounds.bound(shape, batch.tokens, batch.distinct, column.expert_bytes, self.ceilings)
        out = {
            "us": 1e6 * times.median, "p10_us": 1e6 * times.spread[0], "p90_us": 1e6 * times.spread[1], "bound_us": 1e6 * least.seconds, "limit": least.limit,
            "fraction": least.seconds / times.median, "tflops": bounds.flop(shape, batch.tokens) / times.median / 1e12, "calls": batch.calls,
            "experts": sum(batch.distinct) / batch.calls, "samples_us": [1e6 * s for s in times.seconds],
        }  # fmt: skip
        if kind.ours:
            begin = timing.timed(column.begin, column.copies, batch, samples)
            gemm_s = times.median - begin.median
            out |= {"begin_us": 1e6 * begin.median, "gemm_us": 1e6 * gemm_s, "gemm_fraction": least.seconds / gemm_s}
        return {k: round(v, 4) if isinstance(v, float) else [round(s, 3) for s in v] if isinstance(v, list) else v for k, v in out.items()}


def kinds_for(shape: Shape, names: Sequence[str]) -> list[Kind]:
    """A shape's columns, of those names (none: all)."""
    return [KINDS[n] for n in names] if names else columns_of(shape)
