"""The expert GEMM benchmark without a GPU: routing, rows and their values, bounds, claims, what the table does when a column fails, the pages it is rendered into, and our
column with its kernels in the emulator."""

import importlib.util
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

ROOT = Path(__file__).parents[2]
sys.path += [str(ROOT / "benchmarks"), str(ROOT / "benchmarks" / "gpu")]
import moe_gemm
from gemm import bounds, ceilings, claims, counts, inputs, reference, rowdecode, rowfill, table, timing
from gemm.bounds import Ceilings
from gemm.columns import KINDS, columns_of
from gemm.columns.ours import Ours
from gemm.shapes import SHAPES, Shape
from gemm.table import Table
from gemm.timing import Times

from moet.kernels.expert_mlp import reference as oracle
from moet.kernels.expert_mlp.cuda import SOURCES
from moet.layout import FORMATS, RowGeometry
from moet.models import Activation
from moet.moe.device import PAGER_SOURCES
from tests.cpu.emulator.build import EmulatedModule

CPU = torch.device("cpu")
TINY = Shape("tiny", 128, 64, 16, 3)


# --- inputs


def test_a_token_takes_its_experts_once_and_every_batch_again_the_same():
    for shape in (SHAPES["v4-flash"], SHAPES["v4-flash-uniform"]):
        ids = inputs.routed(shape, 3, 16)
        assert ids.shape == (3, 16, 6) and (np.diff(np.sort(ids, -1), axis=-1) > 0).all() and ids.min() >= 0 and ids.max() < 256
        assert (ids == inputs.routed(shape, 3, 16)).all() and (ids != inputs.routed(shape, 3, 16, seed=1)).any()


def test_popular_routing_reads_fewer_experts_than_uniform():
    count = lambda name, tokens: np.mean(inputs.distinct_experts(inputs.routed(SHAPES[name], 8, tokens)))
    for tokens, uniform in ((8, 256 * (1 - (1 - 6 / 256) ** 8)), (64, 256 * (1 - (1 - 6 / 256) ** 64))):
        assert count("v4-flash-uniform", tokens) == pytest.approx(uniform, rel=0.05)
        assert count("v4-flash", tokens) < 0.65 * uniform


def test_calls_of_a_replay_read_more_than_a_cache_holds():
    for shape in SHAPES.values():
        for tokens in (1, 8, 256):
            calls = inputs.call_count(shape, tokens, 2)
            read = sum(inputs.distinct_experts(inputs.routed(shape, calls, tokens))) * shape.geometry("tcq2").extras_offset
            assert calls % 2 == 0 and 2 <= calls <= inputs.MOST_CALLS and (read > 1e9 or calls == inputs.MOST_CALLS)


def test_routing_weights_sum_to_one():
    made = inputs.make(TINY, 5, 2, CPU)
    assert made.x.shape == (made.calls, 5, 128) and made.x.dtype == torch.bfloat16 and made.ids.dtype == torch.int32
    torch.testing.assert_close(made.weights.sum(-1), torch.ones(made.calls, 5))


# --- rows


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(("hidden", "inter", "biased"), [(96, 64, False), (64, 96, True)])
def test_rows_decode_as_the_format_says(format, hidden, inter, biased):
    g = RowGeometry(format, hidden, inter, biased)
    rows = torch.empty(3, g.row_bytes, dtype=torch.uint8)
    rowfill.fill(g, rows, seed=1)
    for row in rows[1:]:
        wanted = oracle.decode_row(g, row.numpy())
        for found, full in zip(rowdecode.matrices(g, row), wanted, strict=True):
            if found is not None:
                whole = torch.from_numpy(full)[tuple(slice(0, n) for n in found.shape)]
                torch.testing.assert_close(found.double(), whole, rtol=1e-6, atol=0)   # one product in float32
                assert torch.isfinite(found).all()
        exact = rowdecode.matrices(g, row, torch.float64)[:3]
        assert all(torch.equal(found, torch.from_numpy(full)[tuple(slice(0, n) for n in found.shape)]) for found, full in zip(exact, wanted, strict=False))
    assert not torch.equal(rows[0], rows[1])


def test_rows_have_the_scales_that_keep_results_near_one():
    for format in FORMATS:
        g = RowGeometry(format, 1024, 512, False)
        rows = torch.empty(1, g.row_bytes, dtype=torch.uint8)
        rowfill.fill(g, rows, seed=3)
        assert 2**-7.5 < float(rowdecode.matrices(g, rows[0])[0].std()) < 2**-5.5


@pytest.mark.parametrize("activation", [Activation(), Activation(limit=0.5), Activation("swiglu_oai", 7.0)])
def test_the_layer_in_float32_is_the_oracles(activation):
    g = RowGeometry("mxfp4", 64, 64, True)
    rows = torch.empty(4, g.row_bytes, dtype=torch.uint8)
    rowfill.fill(g, rows, seed=1)
    x, ids, weights = torch.randn(3, 64), torch.tensor([[0, 1], [1, 3], [3, 3]]), torch.rand(3, 2)
    wanted = np.zeros((3, 64))
    for e in range(4):
        wanted += ((ids == e) * weights).sum(1, keepdim=True).numpy() * oracle.expert_mlp(g, rows[e].numpy(), x.numpy(), activation)
    found = reference.layer(lambda e: rowdecode.matrices(g, rows[e]), activation, x, weights, ids)
    assert reference.relative_error(found, torch.from_numpy(wanted)) < 1e-5


def test_nothing_that_is_not_finite_is_near_a_reference():
    wanted = torch.ones(2, 2)
    assert reference.relative_error(wanted + 0.1, wanted) == pytest.approx(0.1)
    bad = wanted.clone()
    bad[0, 0] = float("nan")
    assert np.isnan(reference.relative_error(bad, wanted))


# --- bounds and claims


def test_a_bound_is_the_larger_of_reading_and_multiplying():
    found = Ceilings(4.5e12, 4.3e12, 7.8e14)
    v4 = SHAPES["v4-flash"]
    small = bounds.bound(v4, 1, (6, 6), v4.geometry("tcq2").extras_offset, found)
    assert small.limit == "bytes" and 1e6 * small.seconds == pytest.approx(9.44, rel=0.01)
    large = bounds.bound(v4, 4096, (256,), v4.geometry("tcq2").extras_offset, found)
    assert large.limit == "flops" and large.seconds == pytest.approx(2 * 3 * 4096 * 2048 * 4096 * 6 / 7.8e14)
    assert bounds.bound(v4, 8, (20, 40), 1e6, found).bytes_s == pytest.approx(30e6 / 4.5e12)


def cell(us, gemm_fraction=0.9):
    return {"us": us, "gemm_fraction": gemm_fraction}


CHECKS = {k: {"4": 0.003, "tolerance": 0.01} for k in KINDS}


def test_claims_take_the_worst_batch_and_the_fastest_rival():
    cells = {"v4-flash": {str(t): {"tcq2": cell(10, 0.8 + 0.01 * t), "mxfp4": cell(14), "marlin_mxfp4": cell(30), "humming_mxfp4": cell(20 + t), "humming_uint2": cell(15)} for t in (1, 2, 4, 8, 16)}}
    cells["v4-flash"]["256"] = {"tcq2": cell(100), "triton_fp8": cell(110)}
    found = {c.id: c for c in claims.claims(cells, {"v4-flash": CHECKS})}
    assert found["K1.v4-flash.tcq2"].value == 0.82 and found["K1.v4-flash.tcq2"].held and "x2" in found["K1.v4-flash.tcq2"].what
    assert found["K2.v4-flash.tcq2"].value == 2.2 and found["K2.v4-flash.tcq2"].held and "humming_mxfp4" in found["K2.v4-flash.tcq2"].what
    assert found["K3.v4-flash.tcq2"].value == 1.5 and "K3b.v4-flash.tcq2" not in found
    assert found["K4.v4-flash.tcq2"].value == 1.1 and not found["K4.v4-flash.tcq2"].held
    assert found["K5.v4-flash.mxfp4"].value == 1.5 and "K5.v4-flash.nvfp4" not in found
    assert not any("glm" in id for id in found)


@pytest.mark.parametrize("errors", [{"4": 0.02, "tolerance": 0.01}, {"4": float("nan"), "tolerance": 0.01}, {"4": None, "tolerance": 0.01}, {"tolerance": 0.01}])
def test_a_column_that_is_wrong_takes_no_part(errors):
    cells = {"v4-flash": {"2": {"tcq2": cell(10), "marlin_mxfp4": cell(30), "humming_mxfp4": cell(1)}}}
    found = {c.id: c.value for c in claims.claims(cells, {"v4-flash": {**CHECKS, "humming_mxfp4": errors}})}
    assert found["K2.v4-flash.tcq2"] == 3.0
    assert not claims.claims(cells, {"v4-flash": {**CHECKS, "tcq2": errors}})


def test_weights_that_memory_delivers():
    assert counts.bytes_of_weight(RowGeometry("tcq2", 4096, 2048, False)) == 576 / 2048
    found = counts.table()["sym2"]
    assert found["row_bytes"] == 7_081_984 and found["weights_asked_per_clock_and_sm"]["H200"] == pytest.approx(4.5e12 * 2048 / 576 / 132 / 1.98e9, rel=0.01)


def test_times_of_a_call():
    times = Times(tuple(float(i) for i in range(1, 12)))
    assert times.median == 6.0 and times.spread[0] < 2 and times.spread[1] > 10


# --- the table


class Right:
    """A column that knows the answer."""

    copies, compiles, tolerance, expert_bytes = 2, True, 0.01, 1000.0

    def __init__(self, log):
        self.log, self.notes = log, {}

    def __call__(self, copy, x, weights, ids):
        return x

    def begin(self, copy, x, weights, ids): ...

    def reference(self, copy, x, weights, ids):
        return x.float()

    def close(self):
        self.log.append("closed")


@pytest.fixture
def made(monkeypatch):
    """A table whose columns are `columns[name](log)`, and whose times are 2 ms, 1 ms for what begins a layer."""
    log, columns = [], {}

    def timed(call, copies, batch, samples):
        if batch.tokens in columns.get("slow", ()):
            raise RuntimeError("no memory for this batch")
        return Times((0.001 if getattr(call, "__name__", "") == "begin" else 0.002,) * samples)

    monkeypatch.setattr(timing, "timed", timed)
    monkeypatch.setattr(table.Kind, "make", lambda kind, shape, device, tokens: columns[kind.name](log))
    saved = []
    built = Table(Ceilings(1e9, 1e9, 1e12), CPU, lambda part, seconds: part not in columns.get("no time", ()), lambda *what: None, lambda: saved.append(json.dumps(built.cells)))
    return SimpleNamespace(table=built, columns=columns, log=log, saved=saved)


def failing(log):
    raise ImportError("no module named humming")


def test_a_column_that_fails_keeps_the_others(made):
    made.columns |= {"tcq2": Right, "marlin_mxfp4": failing, "triton_fp8": Right}
    kinds = [KINDS[n] for n in ("tcq2", "marlin_mxfp4", "triton_fp8")]
    made.table.run(TINY, (1, 4), kinds, 3)
    assert set(made.table.cells["tiny"]["4"]) == {"tcq2", "triton_fp8"} and len(made.saved) == 3 and made.log == ["closed", "closed"]
    assert "no module named humming" in made.table.errors["tiny"]["marlin_mxfp4"]
    ours, others = (made.table.cells["tiny"]["4"][n] for n in ("tcq2", "triton_fp8"))
    assert ours["us"] == 2000 and ours["begin_us"] == ours["gemm_us"] == 1000 and ours["gemm_fraction"] == pytest.approx(2 * ours["fraction"], rel=1e-3)
    assert "gemm_us" not in others and made.table.checks["tiny"]["tcq2"]["4"] == 0


def test_a_batch_that_fails_keeps_the_others(made):
    made.columns |= {"tcq2": Right, "slow": (4,)}
    made.table.run(TINY, (1, 4, 8), [KINDS["tcq2"]], 3)
    assert set(made.table.cells["tiny"]) == {"1", "8"} and list(made.table.errors["tiny"]) == ["tcq2 x4"]


def test_what_is_there_is_not_run_again(made):
    made.columns |= {"tcq2": Right, "sym2": failing, "no time": ("tiny mxfp4",), "mxfp4": Right}
    made.table.run(TINY, (1,), [KINDS[n] for n in ("tcq2", "sym2", "mxfp4")], 3)
    assert "mxfp4" not in made.table.cells["tiny"]["1"] and "mxfp4" not in made.table.errors["tiny"]
    made.columns.update({"sym2": Right, "no time": ()})
    made.table.run(TINY, (1, 4), [KINDS[n] for n in ("tcq2", "sym2", "mxfp4")], 3)
    assert made.table.lacks(TINY, (1, 4), KINDS["tcq2"]) == [] and set(made.table.cells["tiny"]["4"]) == {"tcq2", "mxfp4"}
    assert made.log == ["closed"] * 3


def test_a_wrong_column_is_seen(made):
    class Wrong(Right):
        def __call__(self, copy, x, weights, ids):
            return x * 1.1

    made.columns["tcq2"] = Wrong
    made.table.run(TINY, (1, 4), [KINDS["tcq2"]], 3)
    assert made.table.checks["tiny"]["tcq2"]["4"] == pytest.approx(0.1, rel=0.05) and not claims.valid(made.table.checks["tiny"]["tcq2"])


def test_checks_cover_both_paths():
    assert table.check_batches((1, 2, 4, 8, 16, 64, 256, 1024, 4096)) == [2, 1024]
    assert table.check_batches((8, 1, 256)) == [8, 256] and table.check_batches((4096,)) == [4096] and table.check_batches((1,)) == [1]


def test_every_column_is_asked_of_the_shapes_of_the_claims():
    assert [s.name for s in SHAPES.values() if s.full] == list(claims.K_SHAPES)
    assert columns_of(SHAPES["glm-5.2"]) == list(KINDS.values()) and len(columns_of(SHAPES["gpt-oss-120b"])) == 3


@pytest.fixture
def program(monkeypatch, made, tmp_path):
    """moe_gemm.main(*arguments) on the CPU over `made.columns`; returns what it wrote."""
    monkeypatch.setattr(moe_gemm, "DEVICE", "cpu")
    monkeypatch.setattr(moe_gemm.ahead, "ours", lambda formats: made.log.append(f"compiled {','.join(formats)}"))
    monkeypatch.setattr(moe_gemm.ahead, "start_humming", lambda *what: None)
    monkeypatch.setattr(moe_gemm.ceilings, "measure", lambda device: (Ceilings(4.5e12, 4.3e12, 7.8e14), {"read_gb_per_s": [4500.0]}))
    monkeypatch.setitem(SHAPES, "tiny", TINY)

    def main(*arguments: str) -> dict:
        monkeypatch.setattr(sys, "argv", ["moe_gemm.py", "--out", str(tmp_path), "--shapes", "tiny", "--samples", "3", *arguments])
        moe_gemm.main()
        return json.loads((tmp_path / "moe_gemm.json").read_text())

    return main


def test_the_program_writes_what_a_result_holds_and_goes_on_from_it(program, made, tmp_path):
    made.columns |= {"tcq2": Right, "marlin_mxfp4": failing}
    first = program("--tokens", "1,4", "--columns", "tcq2,marlin_mxfp4")
    assert {"date", "commit", "machine", "versions", "mode", "claims", "samples", "ceilings", "errors", "checks", "notes", "counts", "shapes"} <= set(first)
    assert set(first["samples"]["cells"]["tiny"]) == {"1", "4"} and "marlin_mxfp4" in first["errors"]["tiny"] and made.log == ["compiled tcq2", "closed"]
    made.columns["sym2"] = Right
    second = program("--tokens", "1", "--columns", "tcq2,sym2,marlin_mxfp4", "--resume", str(tmp_path / "moe_gemm.json"))
    assert set(second["samples"]["cells"]["tiny"]["1"]) == {"tcq2", "sym2"} and second["samples"]["cells"]["tiny"]["4"] == first["samples"]["cells"]["tiny"]["4"]
    assert second["errors"] == first["errors"] and second["ceilings"] == first["ceilings"]
    made.columns["marlin_mxfp4"] = Right
    third = program("--tokens", "1", "--columns", "tcq2,marlin_mxfp4", "--anew", "marlin_mxfp4,tcq2", "--resume", str(tmp_path / "moe_gemm.json"))
    assert set(third["samples"]["cells"]["tiny"]["1"]) == {"tcq2", "sym2", "marlin_mxfp4"} and not third["samples"]["cells"]["tiny"]["4"] and not third["errors"]["tiny"]


def test_after_a_lost_context_the_program_goes_on_with_the_batches_behind(program, made, monkeypatch, tmp_path):
    made.columns |= {"tcq2": Right, "sym2": Right, "slow": (4,)}
    calls = []

    def lost(it, after):
        raise table.ContextLost(after)

    monkeypatch.setattr(Table, "_still_there", lost)
    monkeypatch.setattr(moe_gemm.os, "execv", lambda path, arguments: calls.append(arguments))
    found = program("--tokens", "1,4,8", "--columns", "tcq2,sym2")
    assert set(found["samples"]["cells"]["tiny"]) == {"1"} and list(found["errors"]["tiny"]) == ["tcq2 x4"]
    (arguments,) = calls
    assert arguments[arguments.index("--resume") + 1] == str(tmp_path / "moe_gemm.json") and arguments[arguments.index("--columns") + 1] == "tcq2,sym2"
    assert made.log == ["compiled tcq2,sym2", "closed"]


def test_unknown_names_are_refused():
    with pytest.raises(Exception, match="expected some of .*found tcq3"):
        moe_gemm.names(list(KINDS), "tcq2,tcq3")
    assert moe_gemm.names(list(KINDS), "") == []


def test_a_result_survives_being_written_and_read():
    found = Ceilings(4.5e12, 4.3e12, 7.8e14)
    assert moe_gemm.ceilings_of(json.loads(json.dumps(moe_gemm.described(found, {"read_gb_per_s": [1.0]})))) == found


# --- pages


def test_the_pages_show_cells_failures_and_wrong_columns(tmp_path, monkeypatch):
    spec = importlib.util.spec_from_file_location("render_results", ROOT / "scripts" / "render_results.py")
    render = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(render)
    monkeypatch.setattr(render, "RESULTS", tmp_path)
    assert render.GEMM_DECODE() == render.gemm_failures() == ""
    here = {"us": 12.34, "fraction": 0.8, "tflops": 4.0}
    result = {
        "samples": {"cells": {"v4-flash": {"1": {"tcq2": here}, "8": {"tcq2": here, "marlin_mxfp4": here}, "256": {"tcq2": here}}}},
        "errors": {"v4-flash": {"humming_uint2": "ImportError: humming"}}, "checks": {"v4-flash": {"tcq2": {"4": 0.02, "tolerance": 0.01}, "marlin_mxfp4": {"4": 0.001, "tolerance": 0.01}}},
    }  # fmt: skip
    (tmp_path / "moe_gemm.json").write_text(json.dumps(result))
    assert "| v4-flash | ours tcq2 | 12 (80 %) |  |  | 12 (80 %) |  |  |" in render.GEMM_DECODE()
    assert "| v4-flash | Marlin MXFP4 |  |  |  | 12 (80 %) |  |  |" in render.GEMM_DECODE()
    assert "| v4-flash | ours tcq2 | 4 (80 %) |  |  |" in render.GEMM_PREFILL() and "Marlin" not in render.GEMM_PREFILL()
    assert "humming_uint2: ImportError" in render.gemm_failures() and "tcq2: relative errors {'4': 0.02}" in render.gemm_failures() and "marlin_mxfp4" not in render.gemm_failures()


# --- ours, in the emulator


@pytest.mark.parametrize("format", ["tcq2", "mxfp4", "fp8"])
def test_our_column_gives_what_its_rows_say(format):
    index = FORMATS.index(format)
    modules = {index: EmulatedModule(SOURCES, {"FORMAT": index}), -1: EmulatedModule(PAGER_SOURCES, {})}
    small = Shape("small", 128, 96, 4, 2)
    column = Ours(small, format, CPU, modules=modules, most=33, decode=8)
    for tokens in (4, 33):   # decoding, and a prefill
        assert table.check(column, small, CPU, tokens) < column.tolerance
    assert column.runtime.counters().misses == 0
    column.close()


@pytest.mark.parametrize("at", [0, 16 * 2500 + 4, 16 * 5000 - 4])
def test_the_kernel_that_reads_sees_every_byte(at):
    module = EmulatedModule([ceilings.SOURCE], {})
    data, never = torch.zeros(16 * 5000, dtype=torch.uint8), torch.zeros(1, dtype=torch.int32)
    ceilings.read(module, data, never, 64, 2)
    assert never.item() == 0
    data[at : at + 4] = 255   # a thread's words then add up to 2^32 - 1
    ceilings.read(module, data, never, 64, 2)
    assert never.item() == 1
