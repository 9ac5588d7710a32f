"""Scans: rows in their slots are read in place, absent ones pass through the ring, and decoding finds everything as it was."""

import ctypes

import numpy as np
import pytest
from paging_rig import SOURCES, ReadArgs, Rig

from moet.kernels.paging.state import FAILED_ROW, RESOLVE_THREADS, ScanArgs
from tests.cpu.emulator.build import EmulatedModule, compiler

pytestmark = pytest.mark.skipif(compiler is None, reason="needs g++")


@pytest.fixture(scope="module")
def module():
    return EmulatedModule(SOURCES)


def scan_args(rig, layer, ids, kv=None, ahead=1, wave=0, begins_step=0):
    args = rig.memory.layer_args(layer, ids, kv, begins_step)
    out = ScanArgs(layer=args, absent=ctypes.addressof(rig.memory.absent[layer % 2]), wave=wave, ahead=ahead)
    out.kept = args.kept
    return out


def launch(rig, kernel, blocks, threads, args):
    rig.module.configure(int(rig.rng.choice([1, 2, 8])), 60.0)
    rig.module.seed = int(rig.rng.integers(1, 1 << 40))
    rig.module.launch(kernel, blocks, threads, args)


def list_rows(rig, layer, ids, kv=None, ahead=1, begins_step=0):
    launch(rig, "absent_rows", 1, RESOLVE_THREADS, scan_args(rig, layer, ids, kv, ahead, 0, begins_step))
    return rig.memory.absent[layer % 2]


def fetch(rig, layer, wave):
    launch(rig, "fetch_ring", int(rig.rng.integers(1, 6)), 64, scan_args(rig, layer, [[-1]], wave=wave))


def scan(rig, layer, ids, kv=None, fetched=0):
    """Reads a layer whose first `fetched` waves are there; {expert: 'whole' | 'failed'}."""
    memory = rig.memory
    args = scan_args(rig, layer, ids, kv)
    launch(rig, "resolve_scan", 1, RESOLVE_THREADS, args)
    found = np.zeros(max(memory.plan.count, 1), np.uint64)
    absent = memory.absent[layer % 2]
    for wave in range(absent.waves + 2):
        for ready in range(fetched, wave + 2):  # the next wave comes while this one is read
            fetch(rig, layer, ready)
            fetched = ready + 1
        read = ReadArgs(layer=args.layer, disk=rig.disk.ctypes.data, found=found.ctypes.data, wave=wave, parts=1)
        launch(rig, "read_scan", 3, 64, read)
    launch(rig, "count_scan", 1, 64, ReadArgs(layer=args.layer))
    assert all(found[i] in (1, 2) for i in range(memory.plan.count))
    return {s.expert: "whole" if found[i] == 1 else "failed" for i, s in enumerate(memory.steps())}


def routed(ids, kv, experts):
    ids = np.asarray(ids)
    live = np.ones(len(ids), bool) if kv is None else np.asarray(kv) >= 0
    return {int(e) for e in ids[live].ravel() if 0 <= e < experts}


@pytest.mark.parametrize("seed", range(6))
def test_scans_between_decode_steps(module, seed):
    arena = [0, 5, 12][seed % 3]
    rig = Rig(module, experts=20, slots=14, ring=[2, 3, 7][seed % 3], arena_slots=arena, seed=seed + 1, evicts=60)
    memory = rig.memory
    counted = memory.counters()
    with rig.served():
        for step in range(8):
            for layer in (0, 1):
                assert set(rig.layer(layer, rig.ids(2), layer == 0).values()) <= {"whole"}
            before, valid = memory.state(), memory.valid.copy()
            kv = rig.rng.integers(-1, 4, 30)
            ids = rig.rng.integers(-1, 20, (2, 30, 4)) if step % 2 else rig.rng.integers(-1, 6, (2, 30, 4))
            ahead = int(step % 3 > 0)
            absent = list_rows(rig, 0, ids[0], kv, ahead, 1)
            resident = {int(memory.row_of[s]) for s in range(14) if memory.valid[s]}
            wanted = set(range(20)) if ahead else routed(ids[0], kv, 20)
            rows = [absent.steps[p].row for p in range(absent.count)]
            assert rows == sorted(wanted - resident)
            assert absent.waves == -(-len(rows) // memory.cls.ring)
            fetch(rig, 0, 0)
            wanted = routed(ids[0], kv, 20)
            for layer in (0, 1):
                if layer:
                    list_rows(rig, 1, ids[1], kv, ahead)  # made while layer 0 was read: its list is another one
                before_counters = memory.counters()
                found = scan(rig, layer, ids[layer], kv, fetched=1 - layer)
                assert found == {e: "whole" for e in routed(ids[layer], kv, 20)}
                check_plan(rig, layer, ids[layer], kv)
                grown = {k: v - before_counters[k] for k, v in memory.counters().items()}
                hits = sum(s.hit for s in memory.steps())
                assert (grown["scan_hits"], grown["scan_misses"]) == (hits, len(found) - hits)
                assert grown["hits"] == grown["misses"] == 0
            assert memory.state() == before and (memory.valid == valid).all()
    rig.check_whole_pool()
    assert memory.counters()["scan_misses"] > counted["scan_misses"] and rig.failures() == 0


def check_plan(rig, layer, ids, kv):
    memory = rig.memory
    plan, absent, cls = memory.plan, memory.absent[layer % 2], memory.cls
    waves = [s.wave for s in memory.steps()]
    assert waves == sorted(waves)
    for w in range(65):
        assert plan.wave_begin[w] == sum(v < w for v in waves)
    for s in memory.steps():
        if s.hit:
            assert s.wave == 0 and memory.row_of[s.slot] == s.row and s.reserved == -1
        else:
            p = s.reserved
            assert absent.position[s.expert] == p and s.wave == p // cls.ring
            assert s.slot == cls.slots + s.wave % 2 * cls.ring + p % cls.ring
        got = memory.pairs[s.pair_begin : s.pair_begin + s.pair_count].tolist()
        flat = np.asarray(ids).ravel()
        assert got == [i for i in range(len(flat)) if flat[i] == s.expert and (kv is None or kv[i // 4] >= 0)]


def test_failed_rows_of_a_scan(module):
    rig = Rig(module, experts=16, slots=6, ring=3, arena_slots=4, seed=4)
    rig.fails[[3, 8, 11]] = 1
    rig.location[[3, 8, 11]] = 0
    ids = np.arange(16).reshape(4, 4)
    with rig.served():
        list_rows(rig, 0, ids, begins_step=1)
        found = scan(rig, 0, ids)
        assert {e for e, state in found.items() if state == "failed"} == {3, 8, 11}
        assert rig.failures() == rig.memory.counters()["failed_rows"] == 3
        list_rows(rig, 0, ids, begins_step=1)
        others = np.where(np.isin(ids, [3, 11]), -1, ids)   # brought all the same, and nobody's
        assert {e for e, state in scan(rig, 0, others).items() if state == "failed"} == {8}
        assert rig.failures() == rig.memory.counters()["failed_rows"] == 4
        rig.fails[:] = 0
        list_rows(rig, 0, ids, begins_step=1)
        assert set(scan(rig, 0, ids).values()) == {"whole"}


def test_an_unarmed_scan_brings_nothing(module):
    rig = Rig(module, ring=3)
    rig.memory.control.armed = 0
    absent = list_rows(rig, 0, [[1, 2]], begins_step=1)
    assert absent.count == absent.waves == 0
    assert scan(rig, 0, [[1, 2]]) == {} and rig.memory.plan.waves == 0
    assert not any(rig.memory.counters().values())


def test_a_row_that_nobody_brings_is_lost(module):
    rig = Rig(module, experts=8, layers=1, slots=8, ring=0)
    rig.layer(0, [[0, 1, 2, 3]])
    absent = list_rows(rig, 0, [[0, 1, 6, 7]])
    assert absent.count == 0
    found = scan(rig, 0, [[0, 1, 6, 7]])
    assert found == {0: "whole", 1: "whole", 6: "failed", 7: "failed"}
    assert [rig.memory.plan.ready[i] for i in range(4)] == [0, 0, FAILED_ROW, FAILED_ROW] and rig.failures() == 2


def test_a_scan_clears_the_time_limit_before_its_rows_are_fetched(module):
    rig = Rig(module, ring=3)
    rig.memory.control.timed_out = 1
    list_rows(rig, 0, [[1, 2]])
    assert rig.memory.control.timed_out == 1
    list_rows(rig, 0, [[1, 2]], begins_step=1)
    assert rig.memory.control.timed_out == 0
