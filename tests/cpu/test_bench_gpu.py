"""What the GPU benchmarks compute without a GPU: bounds and claims, the routing's locality, the replay baseline's cache, rows and row files."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path += [str(BENCHMARKS), str(BENCHMARKS / "gpu")]
import arithmetic
import checks
import disk
import reduced
import routing
from arithmetic import Samples
from residency import Residency
from rows import V4_FLASH, Shape, layers_of_rows, put_all, random_rows

from moet.kernels import expert_mlp
from moet.layout import check_row
from moet.models import Activation

SMALL = Shape(layers=2, experts=6, hidden=256, inter=96)


def samples(seconds, moved, routing="trace", coverage=0.2, tokens=1):
    return Samples(coverage, tokens, routing, tuple(seconds), tuple(int(m // 100) for m in moved), tuple(moved))


def test_bound_is_the_resident_step_plus_each_steps_own_bytes():
    steps = samples([0.003, 0.0055], [1000, 3000])
    assert arithmetic.bounds(steps, 0.002, 1e6) == [0.003, 0.005]
    assert arithmetic.over_bound(steps, 0.002, 1e6) == pytest.approx(1.05)
    assert arithmetic.over_bound_total(steps, 0.002, 1e6) == pytest.approx(0.0085 / 0.008)


def test_hidden_is_what_the_step_did_not_become_longer_by():
    moved = [1000, 3000]   # 4 ms at 1 MB/s
    assert arithmetic.hidden(samples([0.003, 0.005], moved), 0.002, 1e6) == pytest.approx(0)
    assert arithmetic.hidden(samples([0.002, 0.002], moved), 0.002, 1e6) == pytest.approx(1)
    assert arithmetic.hidden(samples([0.004, 0.006], moved), 0.002, 1e6) == pytest.approx(-0.5)
    assert arithmetic.hidden(samples([0.002], [0]), 0.002, 1e6) is None


def test_samples_must_be_equally_many():
    for wrong in (((0.1,), (), (1,)), ((), (), ())):
        with pytest.raises(ValueError, match="equally many"):
            Samples(0.2, 1, "trace", *wrong)


def test_trend_is_one_in_a_steady_state():
    assert arithmetic.trend([4, 4, 4, 4]) == 1 and arithmetic.trend([9, 3, 2, 1]) == pytest.approx(0.25)
    assert arithmetic.trend([0, 1]) is None


def test_scale_claims_hold_up_to_a_tenth_over_the_bound():
    resident, rate = {("trace", 1): 0.002}, 1e6
    for seconds, held in ((0.0033, True), (0.0034, False)):
        (claim,) = arithmetic.scale_claims([samples([seconds] * 3, [1000] * 3)], resident, rate)
        assert claim.id == "G2" and claim.held is held
    assert arithmetic.scale_claims([samples([1.0], [1], routing="router"), samples([1.0], [1], coverage=1.0)], resident, rate) == []


def test_replay_claims_compare_the_same_configuration():
    paged = [samples([0.001] * 3, [1] * 3), samples([0.001] * 3, [1] * 3, routing="router")]
    replayed = [samples([0.0016] * 3, [1] * 3), samples([0.0016] * 3, [1] * 3, routing="router"), samples([9.0], [1], coverage=0.15)]
    trace, router = arithmetic.replay_claims(paged, replayed)
    assert (trace.value, trace.target, trace.held) == (1.6, 1.5, True) and (router.value, router.target, router.held) == (1.6, 2.0, False)


def test_prefill_is_bound_by_the_slower_of_gemms_and_link():
    by_link = arithmetic.prefill_claim(1.25, 0.4, 1_000_000, 1e6, 8192, 0.2)
    by_gemm = arithmetic.prefill_claim(2.0, 1.2, 1_000_000, 1e6, 8192, 0.2)
    assert (by_link.value, by_link.held) == (0.8, True) and (by_gemm.value, by_gemm.held) == (0.6, False)


def nvme_result(read_gb_per_s: float, start: float) -> dict:
    """Two steps that read 3 rows of 1000 bytes each; 8 rows filled in 4 us: 2 GB/s."""
    paged = {"seconds": [5e-6, 7e-6], "missed_rows": [4, 6], "bytes": [4000, 6000], "disk_bytes": [3000, 3000]}
    return {
        "disk": {"read_gb_per_s": [read_gb_per_s, 0.5]}, "filled_rows": 8, "times_s": {arithmetic.FILL: 4e-6, "start": start},
        "samples": {"arena 27 %": paged, "all in RAM": {"seconds": [3e-6, 5e-6]}},
    }  # fmt: skip


def test_nvme_claims_take_the_fastest_that_the_disk_was_seen():
    step, start = arithmetic.nvme_claims(nvme_result(1.0, 4.8e-6))
    assert arithmetic.disk_bytes_per_s(nvme_result(1.0, 1)) == pytest.approx(2e9)
    assert (step.value, step.held, start.value, start.held) == (1.091, True, 1.2, True)   # 6 us over 4 + 1.5; 4.8 over 4
    step, start = arithmetic.nvme_claims(nvme_result(4.0, 4.8e-6))
    assert (step.value, step.held, start.value, start.held) == (1.263, False, 2.4, False)   # 6 over 4 + 0.75; 4.8 over 2


def test_committed_nvme_claims_follow_from_their_samples():
    path = BENCHMARKS.parent / "docs" / "results" / "gpu_nvme.json"
    if not path.exists():
        pytest.skip("not measured yet")
    result = json.loads(path.read_text())
    assert result["claims"] == [c.as_dict() for c in arithmetic.nvme_claims(result)]


def test_the_trace_has_the_stated_locality_and_is_its_seeds():
    ids = routing.trace(200, 6, 1, V4_FLASH.experts, V4_FLASH.top_k, threads=2)
    assert ids.shape == (200, 6, 1, 6) and ids.dtype == np.int32
    assert all(len(set(row)) == 6 for row in ids.reshape(-1, 6).tolist())
    found = routing.locality(ids, V4_FLASH.experts)
    assert 0.94 < found["hot_share_serves"] < 0.98 and 0.55 < found["repeats"] < 0.8 and found["distinct_per_layer"] == 6
    assert np.array_equal(ids, routing.trace(200, 6, 1, V4_FLASH.experts, V4_FLASH.top_k, threads=1))
    assert not np.array_equal(ids, routing.trace(200, 6, 1, V4_FLASH.experts, V4_FLASH.top_k, seed=1))


def test_locality_of_traces_that_can_be_counted_by_hand():
    ids = np.zeros((4, 1, 2, 2), np.int32)
    ids[..., 1] = 1
    found = routing.locality(ids, 100)   # two rows of a hundred have it all
    assert found["hot_share_serves"] == 1 and found["repeats"] == 1 and found["distinct_per_layer"] == 2
    ids = np.arange(100, dtype=np.int32).reshape(100, 1, 1, 1)
    found = routing.locality(ids, 100)
    assert found["hot_share_serves"] == pytest.approx(0.19) and found["repeats"] == 0 and found["distinct_per_layer"] == 1


def test_correlation_is_from_step_to_step_and_the_deviation_stays_one():
    noise = routing.correlated(np.random.default_rng(0), 400, (300,), 0.8)
    assert noise.std(axis=1)[[0, 200, 399]] == pytest.approx(1, abs=0.15)
    assert np.mean(noise[1:] * noise[:-1]) == pytest.approx(0.8, abs=0.02)


class TestResidency:
    def test_free_slots_first_then_the_coldest_never_one_of_the_step(self):
        cache = Residency(8, 4)
        assert cache.preload(np.array([0, 50, 30, 20, 10, 0, 0, 0])).tolist() == [1, 2, 3, 4]
        cache.begin()
        slots, evicted = cache.place(np.array([0]), used=np.array([4]))   # 4 is the coldest, but in use
        assert evicted.tolist() == [3] and slots.tolist() == [2] and cache.slot_of[3] == -1
        slots, evicted = cache.place(np.array([5, 6]), used=np.array([4]))   # 0 was placed by this step: pinned too
        assert sorted(evicted.tolist()) == [1, 2]
        with pytest.raises(ValueError, match="4 rows in a step, found 1 more"):
            cache.place(np.array([7]), used=np.array([], np.int64))

    def test_a_new_step_pins_nothing(self):
        cache = Residency(4, 2)
        for row in (0, 1, 2, 3):
            cache.begin()
            cache.place(np.array([row]), used=np.array([], np.int64))
            cache.touch(np.array([row]))
        assert cache.row_of.tolist() == [3, 1]   # equally hot rows leave the lowest slot

    def test_tables_agree_and_heat_is_the_pagers(self):
        rng, cache = np.random.default_rng(0), Residency(40, 12)
        for _ in range(300):
            rows = np.sort(rng.choice(40, 6, replace=False))
            cache.begin()
            there = cache.slot_of[rows] >= 0
            cache.place(rows[~there], rows[there]) if not there.all() else None
            assert (cache.slot_of[rows] >= 0).all()
            owned = np.flatnonzero(cache.slot_of >= 0)
            assert np.array_equal(cache.row_of[cache.slot_of[owned]], owned) and len(owned) == (cache.row_of >= 0).sum()
            cache.touch(rows)
        from moet.cache.reference import Bookkeeping

        book, fresh = Bookkeeping(40, 40), Residency(40, 40)
        for _ in range(60):
            rows = np.sort(rng.choice(40, 6, replace=False))
            book.begin(rows.tolist())
            fresh.touch(rows)
        assert fresh.heat.tolist() == book.heat


def test_outcomes_of_a_test_run_and_of_the_sanitizer():
    found = checks.outcomes(
        """<testsuites><testsuite><testcase classname="t" name="test_a"/><testcase classname="t" name="test_short_reads_b"><failure/></testcase>
        <testcase classname="t" name="test_a_read_that_hangs"/><testcase classname="t" name="c"><skipped/></testcase></testsuite></testsuites>"""
    )
    tests, faults = checks.test_claims(found)
    assert (tests.value, tests.target, tests.held) == (2, 3, False) and (faults.value, faults.target, faults.held) == (1, 2, False)
    assert not any(c.held for c in checks.test_claims({"t::c": "skipped"})), "a run that ran nothing shows nothing"
    assert checks.hazards("========= ERROR SUMMARY: 0 errors") == 0 and checks.hazards("========= ERROR SUMMARY: 1 error") == 1
    assert checks.hazards("========= RACECHECK SUMMARY: 12 hazards displayed (3 errors, 9 warnings)") == 12 and checks.hazards("========= COMPUTE-SANITIZER") is None


@pytest.mark.parametrize("format", ["tcq2", "sym2"])
def test_random_rows_are_valid_and_of_the_right_size(format):
    shape = Shape(hidden=512, inter=256, format=format)
    row = random_rows(shape.geometry, 2, 3, torch.device("cpu")).numpy()
    assert not np.array_equal(row[0], row[1])
    x = np.random.default_rng(0).standard_normal((4, 512)).astype(np.float32)
    y = expert_mlp(shape.geometry, row[0], x, Activation())
    # gate and up shrink with sqrt(hidden), the sum over inter too: at 4096 and 2048 the same scales give 0.16 (tcq2)
    assert np.isfinite(y).all() and 1e-4 < np.sqrt((y**2).mean()) < 0.1


def test_every_row_is_put_once_with_bytes_of_its_own():
    seen = {}
    put_all(SMALL, torch.device("cpu"), lambda layer, expert, row: seen.__setitem__((layer, expert), row.tobytes()), threads=2)
    assert sorted(seen) == [(layer, e) for layer in range(2) for e in range(6)] and len(set(seen.values())) == 12


def test_row_files_hold_rows_whose_checksums_hold(tmp_path):
    try:
        sources, rate = disk.write(SMALL, tmp_path, torch.device("cpu"), 2, lambda text: None)
    except OSError as error:
        pytest.skip(f"no O_DIRECT here: {error}")
    assert rate > 0 and disk.read_rate(sources, 2, 0.2, 0) > 0
    size = SMALL.geometry.row_bytes
    for layer, values in layers_of_rows(SMALL, torch.device("cpu")):
        data = np.fromfile(sources[layer].path, np.uint8)
        assert len(data) == disk.HEADER + SMALL.experts * size
        for expert in range(SMALL.experts):
            row = data[disk.HEADER + expert * size :][:size].copy()
            assert not check_row(SMALL.geometry, row)
            assert row[: SMALL.geometry.extras_offset].tobytes() == values.numpy()[expert, : SMALL.geometry.extras_offset].tobytes()
    disk.remove(sources)
    assert not list(tmp_path.iterdir())


def test_what_the_sanitizer_runs_is_right_in_the_emulator(tmp_path):
    found = reduced.run(tmp_path, emulated=True)
    assert found["wrong"] == 0 and found["finite"] and found["calls"] == 22
    done = found["counters"]
    assert done.waves > done.layers and done.scan_misses > 0 and done.arena_misses > 0 and done.failed_rows > 0 and done.timeouts == 0
