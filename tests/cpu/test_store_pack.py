"""The pager over packs that `moet pack` wrote: every row of every layer, base and native, at two ranks,
within a third of its bytes."""

import numpy as np
import pytest
from pack_cases import SOURCES, pack_local

from moet.errors import PackError
from moet.pack import Pack
from moet.store import Pager


@pytest.fixture(scope="module", params=["mxfp4", "nvfp4", "mxfp4 with biases"])
def pack(request, tmp_path_factory) -> Pack:
    root = tmp_path_factory.mktemp("pack")
    SOURCES[request.param](root / "src")
    pack_local(root / "src", root / "dst")
    return Pack.open(root / "dst")


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("precision", ["base", "native"])
def test_all_rows_of_a_pack(pack, precision, world):
    total = sum(
        f.rows(precision).experts * f.rows(precision).geometry.row_bytes for f in pack.layers.values()
    )
    for rank in range(world):
        with Pager.from_pack(
            pack, precision, budget_bytes=total // 3 + (1 << 20), rank=rank, world=world
        ) as pager:
            for _ in range(2):
                for index, files in pack.layers.items():
                    rows = files.rows(precision)
                    data = np.fromfile(rows.path, np.uint8, offset=rows.data_offset).reshape(rows.experts, -1)
                    segments = rows.geometry.slice(rank, world).segments
                    seen = set()
                    for expert, *parts in pager.rows(index, list(range(rows.experts)), scan=True):
                        seen.add(expert)
                        for part, (offset, length) in zip(parts, segments, strict=True):
                            assert np.array_equal(part, data[expert, offset : offset + length])
                    assert seen == set(range(rows.experts))
            counters = pager.counters()
            assert counters.arena_bytes <= total // 3 + (1 << 20)
            assert counters.checksum_failures == counters.io_errors == 0
            assert counters.files_direct + counters.files_buffered == len(pack.layers)


def test_a_pack_without_native_rows_says_so(tmp_path):
    SOURCES["mxfp4"](tmp_path / "src")
    pack_local(tmp_path / "src", tmp_path / "dst", native=False)
    with pytest.raises(PackError, match="expected native rows, found base"):
        Pager.from_pack(Pack.open(tmp_path / "dst"), "native")
