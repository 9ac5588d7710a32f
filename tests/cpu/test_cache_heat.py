"""Heat: counted, kept in a file, used to fill the arena before anyone asks."""

import json
import warnings

import numpy as np
import pytest
from store_rows import ERRNO, Rows, inject

from moet.cache import load_heat, save_heat
from moet.cache.reference import HEAT_UNIT
from moet.errors import StoreError
from moet.layout import RowGeometry
from moet.store import Pager

GEOMETRY = RowGeometry("sym2", 64, 96, False)


@pytest.fixture
def rows(tmp_path):
    return Rows(tmp_path, {3: GEOMETRY, 7: GEOMETRY}, 16)


def test_round_trip_into_another_pager(rows, tmp_path):
    path = tmp_path / "new" / "heat.json"
    with Pager(rows.sources, budget_bytes=16 * GEOMETRY.row_bytes) as pager:
        for _ in range(3):
            rows.check(pager, 3, [1, 2])
        rows.check(pager, 7, [9])
        rows.check(pager, 7, list(range(16)), scan=True)  # scans leave no heat
        save_heat(path, "f1", "base", pager.heat())
    heat = load_heat(path, "f1", "base", {3: 16, 7: 16})
    assert heat is not None and {k: np.flatnonzero(v).tolist() for k, v in heat.items()} == {
        3: [1, 2],
        7: [9],
    }
    assert heat[3][1] == 3 * HEAT_UNIT and [p.name for p in path.parent.iterdir()] == ["heat.json"]
    with Pager(rows.sources, budget_bytes=16 * GEOMETRY.row_bytes) as pager:
        pager.set_heat(heat)
        assert all((pager.heat()[k] == heat[k]).all() for k in heat)
        assert pager.preheat(wait=True) == 3
        rows.check(pager, 3, [1, 2])
        rows.check(pager, 7, [9])
        assert pager.counters().misses == 0 and pager.counters().rows_preheated == 3


def test_preheat_takes_the_hottest_and_only_free_slots(rows):
    heat = {3: np.arange(16, dtype=np.uint32) * 32, 7: np.arange(16, dtype=np.uint32) * 32 + 1}
    with Pager(rows.sources, budget_bytes=16 * GEOMETRY.row_bytes, staging_slots=4) as pager:
        rows.check(pager, 3, [0, 1])
        pager.set_heat(heat)
        assert pager.preheat(4, wait=True) == 4
        assert pager.preheat(wait=True) == 6
        assert pager.preheat(wait=True) == 0
        counters = pager.counters()
        assert (
            counters.slots_valid == 12
            and counters.evictions == 0
            and counters.bytes_read == 12 * GEOMETRY.row_bytes
        )
        rows.check(pager, 3, [11, 12, 13, 14, 15])
        rows.check(pager, 7, [11, 12, 13, 14, 15])
        assert pager.counters().misses == counters.misses


def test_preheat_in_the_background_while_layers_run(rows):
    with Pager(rows.sources, budget_bytes=12 * GEOMETRY.row_bytes, io_threads=2) as pager:
        pager.set_heat({k: np.full(16, 5, np.uint32) for k in (3, 7)})
        pager.preheat()
        for _ in range(4):
            for layer in (3, 7):
                rows.check(pager, layer, list(range(16)), scan=True)
                rows.check(pager, layer, [0, 3, 8])


def test_without_heat_everything_is_read_only_where_everything_fits(rows):
    with Pager(rows.sources) as pager:
        assert pager.preheat(wait=True) == 32
    with Pager(rows.sources, budget_bytes=20 * GEOMETRY.row_bytes) as pager:
        assert pager.preheat(wait=True) == 0


def test_a_row_that_fails_to_preheat_is_read_when_asked_for(rows):
    with Pager(rows.sources) as pager:
        inject(pager, 3, 4, ERRNO, 5)
        pager.preheat(wait=True)
        assert pager.counters().io_errors == 1 and pager.counters().slots_valid == 31
        rows.check(pager, 3, [3, 4])
        assert pager.counters().misses == 1


@pytest.mark.parametrize("change, message", [
    ({"fingerprint": "other"}, "expected fingerprint 'f1', found 'other'"),
    ({"precision": "native"}, "expected precision 'base'"),
    ({"format": 2}, "expected format 1"),
    ({"layers": {"3": [1] * 16}}, "expected heat of 2 layers with 32 experts"),
    ({"layers": {"3": [1] * 16, "7": [1] * 15}}, "expected heat of 2 layers"),
    ({"layers": {"3": [-1] * 16, "7": [1] * 16}}, "heat.json is ignored"),
    ({"layers": [1]}, "is ignored"),
])  # fmt: skip
def test_a_file_of_something_else_is_ignored_with_a_warning(tmp_path, change, message):
    path = tmp_path / "heat.json"
    save_heat(path, "f1", "base", {3: np.ones(16, np.uint32), 7: np.ones(16, np.uint32)})
    assert load_heat(path, "f1", "base", {3: 16, 7: 16}) is not None
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.warns(RuntimeWarning, match=message):
        assert load_heat(path, "f1", "base", {3: 16, 7: 16}) is None


def test_no_file_is_a_cold_start_and_a_torn_one_a_warning(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load_heat(tmp_path / "none", "f", "base", {}) is None
    (tmp_path / "torn").write_text('{"format": 1, "fing')
    with pytest.warns(RuntimeWarning, match="is ignored"):
        assert load_heat(tmp_path / "torn", "f", "base", {}) is None


def test_heat_of_other_shapes_is_refused(rows):
    with (
        Pager(rows.sources) as pager,
        pytest.raises(StoreError, match="heat of layer 7: expected 16 values, found none"),
    ):
        pager.set_heat({3: np.zeros(16, np.uint32)})
