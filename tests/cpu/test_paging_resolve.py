"""resolve against the bookkeeping's specification: same trace, same slots, victims, heat and counts; and the sort of the pairs."""

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from paging_memory import Memory, Reference

from moet.kernels.paging.state import FAILED_ROW, MAX_EXPERTS, MAX_WAVES, LookupArgs
from tests.cpu.emulator.build import EmulatedModule, compiler

pytestmark = pytest.mark.skipif(compiler is None, reason="needs g++")


@pytest.fixture(scope="module")
def module():
    return EmulatedModule(["paging/resolve.cuh"], seed=1)


def sorted_pairs(ids, kv, experts):
    """{expert: its pairs, ascending} of what routes."""
    out = {}
    for pair, expert in enumerate(np.asarray(ids).ravel().tolist()):
        if 0 <= expert < experts and (kv is None or kv[pair // np.shape(ids)[1]] >= 0):
            out.setdefault(expert, []).append(pair)
    return out


def check_plan(memory, args, layer, ids, kv, planned):
    """The plan says what `planned`, the specification's steps, say, by wave."""
    wanted = sorted_pairs(ids, kv, memory.experts)
    steps = memory.steps()
    expected = sorted(planned, key=lambda s: s.wave)  # stable
    assert [(s.row, s.slot, s.wave, bool(s.hit)) for s in steps] == [(s.row, s.slot, s.wave, s.hit) for s in expected]
    for step in steps:
        assert step.row == layer * memory.experts + step.expert and step.reserved == -1
        pairs = memory.pairs[step.pair_begin : step.pair_begin + step.pair_count].tolist()
        assert pairs == wanted[step.expert]
    plan = memory.plan
    waves = max((s.wave for s in planned), default=-1) + 1
    assert (plan.count, plan.waves, plan.misses) == (len(planned), waves, sum(not s.hit for s in planned))
    assert plan.live_tokens == (len(ids) if kv is None else sum(k >= 0 for k in kv))
    for w in range(MAX_WAVES + 1):
        assert plan.wave_begin[w] == sum(s.wave < w for s in planned)
    n = memory.experts
    assert not any(plan.ready[:n]) and not any(plan.copied[:n]) and list(plan.order[:n]) == [-1] * n
    assert not any(plan.ticket) and not any(plan.item[0]) and not any(plan.item[1]) and not any(plan.item[2]) and not any(plan.drawn) and not plan.ring_ready


def run_layer(module, memory, book, layer, ids, kv=None, fail=(), threads=1024):
    """One layer on both; rows of `fail` are not read."""
    experts = sorted(sorted_pairs(ids, kv, memory.experts))
    rows = [layer * memory.experts + e for e in experts]
    before = memory.counters()
    args = memory.resolve(module, layer, ids, kv, threads=threads)
    planned = book.begin(rows) if rows else []
    check_plan(memory, args, layer, ids, kv, planned)
    assert memory.state() == book.state()
    working = [book.heat[r] for s, r in enumerate(book.row_of) if r >= 0 and s not in book.staging]
    assert memory.cls.coldest <= min(working, default=1 << 30)
    grown = {k: v - before[k] for k, v in memory.counters().items() if v != before[k]}
    misses = sum(not s.hit for s in planned)
    counts = {"hits": len(planned) - misses, "misses": misses, "waves": memory.plan.waves, "layers": 1 if rows else 0}
    assert grown == {k: v for k, v in counts.items() if v}
    for step in memory.steps():
        owner = memory.row_of[step.slot]
        if not step.hit and owner == step.row:
            assert not memory.valid[step.slot]
            if step.row in fail:
                book.broken.add(step.row)
            else:
                memory.valid[step.slot] = 1


@st.composite
def traces(draw):
    experts, layers = draw(st.integers(2, 40)), draw(st.integers(1, 3))
    rows = experts * layers
    slots = draw(st.integers(min(3, rows), rows + 2))
    staging = draw(st.none() | st.integers(1, 12))
    hysteresis, age = draw(st.integers(0, 40)), draw(st.none() | st.integers(1, 80))
    top_k = draw(st.integers(1, 6))
    seeds = draw(st.lists(st.integers(0, 1 << 30), min_size=1, max_size=14))
    return experts, layers, slots, staging, hysteresis, age, top_k, seeds, draw(st.booleans()), draw(st.sampled_from([64, 96, 256]))


@settings(max_examples=120, deadline=None)
@given(traces())
def test_same_trace_same_slots(module, trace):
    experts, layers, slots, staging, hysteresis, age, top_k, seeds, failing, threads = trace
    memory = Memory(experts, layers, slots, staging, hysteresis, age)
    book = Reference(experts * layers, slots, staging, hysteresis, 4 * experts * layers if age is None else age)
    for seed in seeds:
        rng = np.random.default_rng(seed)
        layer, tokens = int(rng.integers(layers)), int(rng.choice([1, 1, 2, 5, 17]))
        ids = rng.zipf(1.3, (tokens, top_k)) % (experts + 1) - int(rng.random() < 0.3)
        kv = None if rng.random() < 0.4 else rng.integers(-1, 3, tokens)
        fail = set(rng.integers(0, experts * layers, experts).tolist()) if failing else ()
        if rng.random() < 0.1:  # heat of another run
            book.heat = rng.integers(0, 150, experts * layers).tolist()
            memory.heat[:], memory.cls.coldest = book.heat, 0
        run_layer(module, memory, book, layer, ids, kv, fail, threads)


@pytest.mark.parametrize("seed", range(3))
def test_long_zipf_trace(module, seed):
    rng = random.Random(seed)
    experts, layers, top_k = 64, 3, 6
    slots = [12, 60, 150][seed]
    memory, book = Memory(experts, layers, slots), Reference(experts * layers, slots)
    weights = [1 / (e + 1) for e in range(experts)]
    for step in range(240):
        tokens = rng.choice([1, 1, 1, 4, 9])
        ids = np.array([[(e * 7 + step // 80) % experts for e in rng.choices(range(experts), weights, k=top_k)] for _ in range(tokens)])
        run_layer(module, memory, book, step % layers, ids)
    assert book.admitted > 0 and book.evictions > 0


@pytest.mark.parametrize("experts, tokens, top_k", [(1024, 700, 3), (256, 2048, 8), (384, 1, 8), (256, 16, 8), (256, 43, 3), (3, 500, 2), (512, 40, 10)])
def test_many_pairs(module, experts, tokens, top_k):
    rng = np.random.default_rng(experts)
    memory = Memory(experts, 1, experts, pairs=tokens * top_k)
    book = Reference(experts, experts)
    ids = rng.integers(-1, experts, (tokens, top_k))
    kv = rng.integers(-1, 9, tokens)
    for _ in range(2):  # misses, then hits
        run_layer(module, memory, book, 0, ids, kv)


@pytest.mark.parametrize(
    "experts, tokens, top_k, staging, hysteresis", [(60, 10, 6, 12, 16), (30, 1, 6, 8, 1000), (96, 24, 4, 50, 1000), (128, 16, 8, 40, 1000), (128, 128, 1, 128, 1000)]
)
def test_few_pairs_as_by_the_whole_block(module, experts, tokens, top_k, staging, hysteresis):
    """few.cuh and resolve.cuh leave the same bytes; the latter is taken where no thread is left beside those of the pairs."""
    rng = np.random.default_rng(tokens)
    threads = {"few": 1024, "whole": -(-tokens * top_k // 32) * 32}
    memories = {name: Memory(experts, 2, experts, staging, hysteresis, 9 * experts) for name in threads}
    settled = staged = 0
    for step in range(24):
        layer = int(rng.random() < 0.2)
        ids = rng.permutation(experts)[: tokens * top_k] if step % 3 == 0 and tokens * top_k <= experts else rng.zipf(1.3, tokens * top_k) % (experts + 1)
        kv = None if step % 2 == 0 else rng.integers(-1, 5, tokens)
        before = memories["few"].stamp.copy()
        for name, memory in memories.items():
            memory.resolve(module, layer, ids.reshape(tokens, top_k), kv, begins_step=step % 4 == 0, threads=threads[name])
            for s in memory.steps():
                if memory.row_of[s.slot] == s.row:
                    memory.valid[s.slot] = 1
        few, whole = memories.values()
        plans = [bytes(m.plan)[: type(m.plan).pairs.offset] for m in (few, whole)]
        assert plans[0] == plans[1] and not few.plan.ring_ready and few.pairs.tolist() == whole.pairs.tolist()
        assert few.state() == whole.state() and few.counters() == whole.counters() and few.stamp.tolist() == whole.stamp.tolist()
        assert all(getattr(few.cls, f) == getattr(whole.cls, f) for f in ("coldest", "touches", "newest", "oldest"))
        settled += few.plan.count > 0 and not few.plan.misses
        staged += not few.plan.misses and (before != few.stamp).any()
    assert settled > 3 and (hysteresis < 1000 or staged > 0)


def test_large_staging_and_many_waves(module):
    rng = np.random.default_rng(5)
    memory, book = Memory(300, 2, 400, staging=290), Reference(600, 400, 290)
    for step in range(8):
        run_layer(module, memory, book, step % 2, rng.integers(0, 300, (100, 3)))
    memory, book = Memory(60, 1, 4, staging=1), Reference(60, 4, 1)
    run_layer(module, memory, book, 0, np.arange(60)[:, None])
    assert memory.plan.waves > 50


def test_unarmed_masked_and_out_of_range_route_nothing(module):
    memory, book = Memory(8, 2, 8), Reference(16, 8)
    for ids, kv in (([[-1, -5]], None), ([[3, 4], [1, 2]], [-1, -1]), ([[8, 1 << 30]], None)):
        run_layer(module, memory, book, 1, np.array(ids), kv)
    memory.control.armed = 0
    memory.resolve(module, 0, [[1, 2]], begins_step=1)
    assert (memory.plan.count, memory.plan.waves, memory.plan.live_tokens) == (0, 0, 0)
    assert memory.state() == book.state() and not any(memory.counters().values())


def test_the_first_layer_of_a_step(module):
    memory = Memory(8, 1, 4)
    memory.control.timed_out = 1
    memory.resolve(module, 0, [[1, 2]])
    assert memory.control.timed_out == 1 and memory.counters()["steps"] == 0
    memory.plan.stall[0], memory.plan.stall[5] = 70, 7
    memory.resolve(module, 0, [[1, 2]], begins_step=1)
    assert memory.control.timed_out == 0 and memory.counters()["steps"] == 1
    assert memory.counters()["stall_nanoseconds"] == 77 and not any(memory.plan.stall)


def test_rows_beyond_the_last_wave_fail(module):
    experts = 90
    memory = Memory(experts, 1, 3, staging=1)
    memory.resolve(module, 0, np.arange(experts)[:, None])
    lost = [i for i in range(experts) if memory.plan.ready[i]]
    waves = [s.wave for s in memory.steps()]
    assert waves == sorted(waves) and memory.plan.waves == MAX_WAVES and len(lost) == experts - 2 - MAX_WAVES
    assert all(memory.plan.ready[i] == FAILED_ROW and waves[i] == MAX_WAVES - 1 for i in lost)
    assert memory.failures.value == memory.counters()["failed_rows"] == len(lost)
    assert sorted(s.expert for s in memory.steps()) == list(range(experts))


def test_lookup_lists_what_is_missing(module):
    memory = Memory(16, 2, 8)
    memory.slot_of[[17, 20, 30]], memory.row_of[[1, 3, 4]], memory.valid[[1, 3]] = [1, 3, 4], [17, 20, 30], 1
    before = memory.state()
    listed = np.array([0, -7, -7, -7, -7, -7], np.int32)
    ids = np.array([[1, 2, 14], [15, 4, 2]])
    args = LookupArgs(layer=memory.layer_args(1, ids), list=listed.ctypes.data, capacity=4)
    module.launch("resolve_lookup", 1, 1024, args)
    assert listed.tolist() == [3, 18, 30, 31, -7, -7]
    assert [(s.expert, s.slot, s.hit) for s in memory.steps()] == [(1, 1, 1), (4, 3, 1), (2, 0, 0), (14, 0, 0), (15, 0, 0)]
    assert list(memory.plan.ready[:5]) == [0, 0, *[FAILED_ROW] * 3] and memory.plan.waves == 1 and memory.plan.misses == 3
    wanted = sorted_pairs(ids, None, 16)
    for s in memory.steps():
        assert memory.pairs[s.pair_begin : s.pair_begin + s.pair_count].tolist() == wanted[s.expert]
    module.launch("resolve_lookup", 1, 1024, args)  # the list is full: what fits
    assert listed.tolist() == [4, 18, 30, 31, 18, -7]
    assert memory.state() == before and MAX_EXPERTS >= 1024
