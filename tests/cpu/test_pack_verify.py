"""Verify finds every changed byte, and repair brings the same bytes back."""

import random
import shutil

import pytest
from pack_cases import SOURCES, contents, copy, pack_local

from moet.checkpoint import LocalSource
from moet.errors import PackError
from moet.pack import Pack
from moet.pack.repair import repair
from moet.pack.verify import verify


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    root = tmp_path_factory.mktemp("made")
    SOURCES["mxfp4"](root / "src")
    (root / "src" / "LICENSE").write_text("terms")
    pack_local(root / "src", root / "dst")
    return root


@pytest.fixture
def pack(made, tmp_path):
    return copy(made / "dst", tmp_path / "pack")


def found_by_verify(root) -> bool:
    """A moet.json of another version is refused outright; that is found too."""
    try:
        return not verify(root).ok
    except PackError:
        return True


def test_a_whole_pack_is_right(pack):
    verdict = verify(pack)
    assert verdict.ok and not verdict.warnings
    assert verdict.bytes == sum(
        p.stat().st_size for p in pack.rglob("*") if p.is_file() and p.name != "moet.json"
    )


def test_200_flipped_bytes_are_found_each(pack):
    """Half of them anywhere in the pack by size, half in a file chosen first, so that small files get their
    share."""
    files = sorted(p for p in pack.rglob("*") if p.is_file())
    rng = random.Random(7)
    for i in range(200):
        path = (
            rng.choices(files, [p.stat().st_size for p in files])[0] if i % 2 else files[i // 2 % len(files)]
        )
        offset, bit = rng.randrange(path.stat().st_size), 1 << rng.randrange(8)
        with path.open("r+b") as file:
            file.seek(offset)
            old = file.read(1)
            file.seek(offset)
            file.write(bytes([old[0] ^ bit]))
        try:
            assert found_by_verify(pack), f"{path.name}, byte {offset}, bit {bit}"
        finally:
            with path.open("r+b") as file:
                file.seek(offset)
                file.write(old)
    assert verify(pack).ok


def test_every_byte_of_moet_json_counts(pack):
    path = pack / "moet.json"
    good = path.read_bytes()
    for offset in range(0, len(good), 41):
        path.write_bytes(good[:offset] + bytes([good[offset] ^ 1]) + good[offset + 1 :])
        with pytest.raises(PackError):
            Pack.open(pack)
    path.write_bytes(good + b"\n")
    with pytest.raises(PackError, match="canonical"):
        Pack.open(pack)


def zero_page(path, offset=None):
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.seek((size // 2 if offset is None else offset) // 4096 * 4096)
        file.write(bytes(4096))


DAMAGE = {
    "row zeroed": ("experts/base-003.safetensors", zero_page),
    "native row zeroed": ("experts/native-002.safetensors", zero_page),
    "header zeroed": ("experts/base-000.safetensors", lambda p: zero_page(p, 0)),
    "row file cut": (
        "experts/native-001.safetensors",
        lambda p: p.open("r+b").truncate(p.stat().st_size - 4096),
    ),
    "row file longer": ("experts/base-001.safetensors", lambda p: p.open("ab").write(b"x")),
    "row file gone": ("experts/base-004.safetensors", lambda p: p.unlink()),
    "dense zeroed": ("dense-00001-of-00002.safetensors", zero_page),
    "dense cut": ("dense-00002-of-00002.safetensors", lambda p: p.open("r+b").truncate(1000)),
    "dense gone": ("dense-00001-of-00002.safetensors", lambda p: p.unlink()),
    "config changed": ("config.json", lambda p: p.write_text(p.read_text().replace("256", "257", 1))),
    "index gone": ("model.safetensors.index.json", lambda p: p.unlink()),
    "tokenizer changed": ("tokenizer.json", lambda p: p.write_text("{}")),
    "licence gone": ("LICENSE", lambda p: p.unlink()),
    "moet.json changed": ("moet.json", lambda p: p.write_bytes(p.read_bytes().replace(b"sym2", b"sym3", 1))),
    "moet.json cut": ("moet.json", lambda p: p.write_bytes(p.read_bytes()[:500])),
    "moet.json's version changed": (
        "moet.json",
        lambda p: p.write_bytes(p.read_bytes().replace(b'"moet":2', b'"moet":3', 1)),
    ),
    "moet.json gone": ("moet.json", lambda p: p.unlink()),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_found_named_and_repaired(made, pack, damage):
    name, spoil = DAMAGE[damage]
    spoil(pack / name)
    verdict = verify(pack)
    assert {fault.file for fault in verdict.faults} == {name}
    untouched = {p: p.stat().st_mtime_ns for p in pack.rglob("*.safetensors") if p != pack / name}
    assert repair(pack, LocalSource(made / "src")).before.faults == verdict.faults
    assert contents(pack) == contents(made / "dst")
    if name != "moet.json":
        assert all(p.stat().st_mtime_ns == t for p, t in untouched.items()), (
            "repair touched a file that was right"
        )
    assert verify(pack).ok


def test_everything_at_once(made, pack):
    for name, spoil in DAMAGE.values():
        if name != "moet.json" and (pack / name).exists():
            spoil(pack / name)
    assert {f.file for f in verify(pack).faults} == {
        name for name, _ in DAMAGE.values() if name != "moet.json"
    }
    repair(pack, LocalSource(made / "src"))
    assert contents(pack) == contents(made / "dst")


def test_a_fault_names_layer_and_expert(pack):
    rows = Pack.open(pack).layers[3].base
    zero_page(rows.path, rows.offset(5))
    (fault,) = verify(pack).faults
    assert (fault.layer, fault.expert, fault.rows) == (3, 5, "base")
    assert "base-003.safetensors, layer 3, expert 5" in str(fault) and "w13 tile 0" in str(fault)


def test_swapped_rows_are_found(pack):
    """Each row is intact by its own checksums; only moet.json knows which is whose."""
    rows = Pack.open(pack).layers[0].base
    data = bytearray(rows.path.read_bytes())
    a, b, n = rows.offset(1), rows.offset(2), rows.geometry.row_bytes
    data[a : a + n], data[b : b + n] = data[b : b + n], data[a : a + n]
    rows.path.write_bytes(data)
    assert [f.expert for f in verify(pack).faults] == [1, 2]


def test_unknown_file_is_a_warning(pack):
    (pack / "README.md").write_text("a model card")
    verdict = verify(pack)
    assert verdict.ok and verdict.warnings == ("README.md",)


def test_repair_refuses_another_source(made, pack, tmp_path):
    from tests.generators import write_deepseek_v4

    write_deepseek_v4(tmp_path / "other", seed=1)
    (tmp_path / "other" / "LICENSE").write_text("terms")
    for name in ("experts/base-003.safetensors", "dense-00001-of-00002.safetensors"):
        spoiled = copy(made / "dst", tmp_path / name.replace("/", "-"))
        zero_page(spoiled / name)
        before = contents(spoiled)
        with pytest.raises(PackError, match="is not what"):
            repair(spoiled, LocalSource(tmp_path / "other"))
        assert {k: v for k, v in contents(spoiled).items() if not k.startswith(".moet")} == before
    (pack / "moet.json").write_bytes(b"{}")
    with pytest.raises(PackError):
        repair(pack, LocalSource(tmp_path / "other"))
    write_deepseek_v4(tmp_path / "third", swiglu_limit=7.0)
    zero_page(pack / "experts" / "base-000.safetensors")
    shutil.copy(made / "dst" / "moet.json", pack)
    with pytest.raises(PackError, match="config and tensor names"):
        repair(pack, LocalSource(tmp_path / "third"))


def test_repair_of_a_right_pack_does_nothing(made, pack):
    before = {p: p.stat().st_mtime_ns for p in pack.rglob("*")}
    assert repair(pack, LocalSource(made / "src")).rewritten == ()
    assert {p: p.stat().st_mtime_ns for p in pack.rglob("*")} == before


def test_missing_and_unfinished_packs_are_told_apart(made, tmp_path):
    with pytest.raises(PackError, match="nothing there"):
        verify(tmp_path / "no")
    with pytest.raises(PackError, match="moet pack SRC DST"):
        verify(made / "src")
    (tmp_path / "half" / ".moet").mkdir(parents=True)
    with pytest.raises(PackError, match="unfinished"):
        verify(tmp_path / "half")
