"""The native bookkeeping against its specification: same trace, same slots, same victims, same counters; and
the rules themselves."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moet.cache.native import NativeBookkeeping
from moet.cache.reference import HEAT_UNIT, Bookkeeping, default_staging


def reference_state(book: Bookkeeping) -> dict[str, list[int]]:
    staged = [int(s in book.staging) for s in range(len(book.row_of))]
    return {
        "heat": book.heat,
        "row_of": book.row_of,
        "staged": staged,
        "counts": [book.evictions, book.admitted],
    }


def check_plan(book: Bookkeeping, before: list[int], rows: list[int], steps) -> None:
    """What must hold for any policy: each row once, in a slot that is its own while it is needed, hits first,
    waves that can make progress."""
    assert sorted(s.row for s in steps) == sorted(rows)
    assert [s.hit for s in steps] == sorted((s.hit for s in steps), reverse=True)
    last = {}
    for i, step in enumerate(steps):
        assert step.hit == (before[step.row] >= 0)
        assert step.after == last.get(step.slot, -1) and step.after < i
        assert step.wave == (steps[step.after].wave + 1 if step.after >= 0 else 0)
        last[step.slot] = i
    owned = [r for r in book.row_of if r >= 0]
    assert len(owned) == len(set(owned))
    assert all(book.slot_of[r] == s for s, r in enumerate(book.row_of) if r >= 0)
    for slot, i in last.items():
        assert book.row_of[slot] == steps[i].row


@st.composite
def traces(draw):
    experts, layers = draw(st.integers(2, 12)), draw(st.integers(1, 3))
    rows = experts * layers
    slots = draw(st.integers(min(4, rows), rows + 1))
    policy = [
        draw(st.none() | st.integers(1, 6)),
        draw(st.none() | st.integers(0, 40)),
        draw(st.none() | st.integers(1, 60)),
    ]
    layer = st.integers(0, layers - 1)
    touched = st.lists(st.integers(0, experts - 1), min_size=1, max_size=experts, unique=True).map(sorted)
    return (
        rows,
        slots,
        policy,
        experts,
        draw(st.lists(st.tuples(layer, touched, st.booleans(), st.booleans()), max_size=60)),
    )


@settings(max_examples=150, deadline=None)
@given(traces())
def test_same_trace_same_slots(trace):
    rows, slots, policy, experts, events = trace
    ours, native = Bookkeeping(rows, slots, *policy), NativeBookkeeping(rows, slots, *policy)
    for layer, touched, scan, prefill in events:
        wanted = [layer * experts + e for e in touched]
        if prefill and ours.slot_of[wanted[0]] < 0:
            assert ours.fill(wanted[0]) == native.fill(wanted[0])
        before = list(ours.slot_of)
        steps = ours.begin(wanted, scan)
        assert native.begin(wanted, scan) == steps
        check_plan(ours, before, wanted, steps)
        assert native.state() == reference_state(ours)


@pytest.mark.parametrize("seed", range(4))
def test_long_zipf_trace_with_scans(seed):
    rng = random.Random(seed)
    experts, layers = 32, 4
    rows, slots = experts * layers, rng.choice([8, 20, 64, 100])
    weights = [1 / (e + 1) for e in range(experts)]
    ours, native = Bookkeeping(rows, slots), NativeBookkeeping(rows, slots)
    for step in range(600):
        layer, scan = step % layers, step % 100 < layers
        touched = range(experts) if scan else sorted(set(rng.choices(range(experts), weights, k=4)))
        wanted = [layer * experts + (e * 7 + layer + step // 300) % experts for e in touched]
        wanted.sort()
        assert native.begin(wanted, scan) == ours.begin(wanted, scan)
    assert native.state() == reference_state(ours)
    assert ours.admitted > 0 and ours.evictions > 0


def test_a_scan_never_changes_the_working_set():
    book = Bookkeeping(64, 16, staging=4)
    hot = list(range(8))
    for _ in range(5):
        book.begin(hot)
    book.begin(list(range(8, 12)))  # fills the working set of 12
    kept = {r for s, r in enumerate(book.row_of) if s not in book.staging}
    heat = list(book.heat)
    steps = book.begin(list(range(64)), scan=True)
    assert {r for s, r in enumerate(book.row_of) if s not in book.staging} == kept
    assert book.heat == heat and book.admitted == 0
    assert (
        max(s.wave for s in steps) == 52 // len(book.staging) - 1
    )  # 64 rows, 12 of them hits, 4 staging slots


def test_first_touch_stays_in_staging_and_a_second_touch_is_admitted():
    book = Bookkeeping(64, 16, staging=4, hysteresis=HEAT_UNIT)
    book.begin(list(range(12)))  # the working set, heat 1 touch each
    first = book.begin([40])[0]
    assert first.slot in book.staging
    book.begin([40])  # 2 touches: hotter, but not by more than one touch
    assert first.slot in book.staging
    hit = book.begin([40])[0]
    assert hit.hit and hit.slot == first.slot and first.slot not in book.staging and book.admitted == 1
    assert book.staging[0] == 0  # coldest, lowest slot number; its row is still readable
    assert book.begin([0])[0].hit


def test_heat_survives_eviction():
    """A row that is hot but lost its slot replaces a cold one as soon as it is read again."""
    book = Bookkeeping(64, 16, staging=4)
    book.heat[50] = 100 * HEAT_UNIT
    book.begin(list(range(12)))
    step = book.begin([50])[0]
    assert not step.hit and step.slot not in book.staging and book.admitted == 1


def test_heat_halves():
    book = Bookkeeping(8, 4, age_every=10)
    book.begin([0, 1, 2, 3])
    book.begin([0, 1, 2, 3])
    assert book.heat[:4] == [2 * HEAT_UNIT] * 4
    book.begin([0, 5])
    assert book.heat[:2] == [2 * HEAT_UNIT, HEAT_UNIT] and book.heat[5] == HEAT_UNIT


@pytest.mark.parametrize(
    "slots, rows, expected",
    [(8, 8, 0), (9, 8, 0), (4, 32, 2), (8, 32, 2), (15, 64, 2), (24, 64, 3), (64, 65, 8), (500, 1000, 8)],
)
def test_default_staging(slots, rows, expected):
    assert default_staging(slots, rows) == expected
    assert sum(NativeBookkeeping(rows, slots).state()["staged"]) == expected
