"""What cannot be packed is refused with one clear message, before any damage and with finished layers
kept."""

import errno
import json
import os
import resource
import subprocess
import sys
from types import SimpleNamespace

import pytest
from pack_cases import SOURCES, contents, pack_local

from moet.errors import CheckpointError, MoetError, PackError, QuantizeError
from moet.pack import Pack, durable, manifest, space

ROOT = os.geteuid() == 0


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    root = tmp_path_factory.mktemp("made")
    SOURCES["mxfp4"](root / "src")
    pack_local(root / "src", root / "dst")
    return root


@pytest.fixture
def src(made, tmp_path):
    from pack_cases import copy

    return copy(made / "src", tmp_path / "src")


def small_files(root):
    return {k for k in contents(root) if not k.startswith(".moet/")}


# Space


def test_full_disk_is_refused_beforehand(made, tmp_path, monkeypatch):
    real = os.statvfs
    monkeypatch.setattr(
        space.os, "statvfs", lambda p: SimpleNamespace(f_bavail=100, f_frsize=4096, st=real(p))
    )
    with pytest.raises(
        PackError,
        match=r"expected .* of free space \(base .*, native .*, dense .*; 0.0 MiB already there\), found 0.4 MiB",
    ):
        pack_local(made / "src", tmp_path / "dst")
    assert small_files(tmp_path / "dst") == set()


def test_preflight_counts_native_rows_and_what_is_there(made):
    total = space.Need(base=5 << 30, native=7 << 30, dense=1 << 30, present=4 << 30)
    assert total.missing == 9 << 30
    assert space.Need(base=5, native=0, dense=1, present=6).missing == 0


def test_preflight_is_exact(made, tmp_path, monkeypatch):
    """The estimate of a complete source is what is written, small files aside."""
    needs = []
    monkeypatch.setattr(space, "check", lambda root, need, freed: needs.append(need))
    for native in (True, False):
        done = pack_local(made / "src", tmp_path / f"{native}", native=native).manifest.report
        need = needs.pop()
        assert (need.base, need.native) == (done.base_bytes, done.native_bytes)
        assert need.dense <= done.dense_bytes <= need.dense + (1 << 20)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_disk_that_fills_up_keeps_finished_layers(made, tmp_path, monkeypatch, code):
    dst, real = tmp_path / "dst", os.pwrite

    def pwrite(fd, data, offset):
        if "base-002" in os.readlink(f"/proc/self/fd/{fd}"):
            real(fd, memoryview(data)[: len(data) // 2], offset)
            raise OSError(code, os.strerror(code))
        return real(fd, data, offset)

    with monkeypatch.context() as m:
        m.setattr(durable.os, "pwrite", pwrite)
        with pytest.raises(PackError, match="no space left while writing .*Finished layers are kept"):
            pack_local(made / "src", dst)
    assert not list((dst / ".moet").glob("tmp-*"))
    assert len(list(dst.glob("experts/*"))) == 4 and not (dst / "moet.json").exists()
    with pytest.raises(PackError, match="unfinished"):
        Pack.open(dst)
    pack_local(made / "src", dst)
    assert contents(dst) == contents(made / "dst")


def test_file_size_limit(made, tmp_path):
    """RLIMIT_FSIZE: the kernel's own refusal (EFBIG) in the middle of a dense file."""
    code = f"""
import resource, sys
from pathlib import Path
sys.path[:0] = {sys.path!r}
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))
from pack_cases import pack_local
pack_local(Path({str(made / "src")!r}), Path({str(tmp_path / "dst")!r}))
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "PackError" in run.stderr and "no space left while writing dense-" in run.stderr
    assert not list((tmp_path / "dst" / ".moet").glob("tmp-*"))
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] != 1 << 20


def mount(*arguments) -> bool:
    return ROOT and subprocess.run(["mount", *map(str, arguments)], capture_output=True).returncode == 0


@pytest.fixture
def small_disk(tmp_path):
    where = tmp_path / "disk"
    where.mkdir()
    if not mount("-t", "tmpfs", "-o", "size=4m", "tmpfs", where):
        pytest.skip("needs the right to mount a tmpfs")
    yield where
    subprocess.run(["umount", str(where)], check=True)


def test_a_disk_of_4_mib(made, small_disk, monkeypatch):
    with pytest.raises(PackError, match="of free space"):
        pack_local(made / "src", small_disk / "dst")
    monkeypatch.setattr(space, "check", lambda *_: None)
    with pytest.raises(PackError, match="no space left"):
        pack_local(made / "src", small_disk / "dst")
    assert not list((small_disk / "dst" / ".moet").glob("tmp-*"))


# Folders


def test_read_only_folder(made, tmp_path):
    dst = tmp_path / "dst"
    dst.mkdir()
    if ROOT:
        if not mount("-t", "tmpfs", "-o", "ro", "tmpfs", dst):
            pytest.skip("root ignores modes, and no tmpfs can be mounted")
    else:
        dst.chmod(0o500)
    try:
        with pytest.raises(PackError, match="expected a folder that can be written"):
            pack_local(made / "src", dst)
    finally:
        if ROOT:
            subprocess.run(["umount", str(dst)], check=True)


def test_dst_that_cannot_be(made, src, tmp_path):
    (tmp_path / "file").write_text("x")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").write_text("x")
    for dst, message in {
        tmp_path / "file": "expected a folder",
        tmp_path / "file" / "below": "found",
        src: "another folder than the source",
        src / "packed": "one is inside the other",
        src.parent: "one is inside the other",
        tmp_path / "other": "expected an empty folder or an unfinished pack, found thesis.tex",
    }.items():
        before = contents(src)
        with pytest.raises(PackError, match=message):
            pack_local(src, dst)
        assert contents(src) == before


def test_a_pack_is_no_source(made, tmp_path):
    with pytest.raises(PackError, match="found a pack"):
        pack_local(made / "dst", tmp_path / "again")


# Sources


def shard(src, number=2):
    return src / f"model-{number:05d}-of-00002.safetensors"


def test_missing_shard(src, tmp_path):
    shard(src).unlink()
    with pytest.raises(CheckpointError, match="model-00002-of-00002"):
        pack_local(src, tmp_path / "dst")


def test_cut_shard(src, tmp_path):
    os.truncate(shard(src), shard(src).stat().st_size - 1)
    with pytest.raises(CheckpointError, match="model-00002-of-00002.*damaged or incomplete"):
        pack_local(src, tmp_path / "dst")
    assert not list((tmp_path / "dst").glob("experts/*"))


@pytest.mark.parametrize("change", ["renamed", "moved"])
def test_stale_index(src, tmp_path, change):
    path = src / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    name = next(n for n in index["weight_map"] if n.endswith("attn_norm.weight"))
    if change == "renamed":
        index["weight_map"]["layers.0.attn_norm.gone"] = index["weight_map"].pop(name)
    else:
        index["weight_map"][name] = "model-00002-of-00002.safetensors"
    path.write_text(json.dumps(index))
    with pytest.raises(CheckpointError):
        pack_local(src, tmp_path / "dst")
    assert not list((tmp_path / "dst").glob("experts/*"))


def test_values_that_are_not_finite(src, tmp_path):
    """UE8M0 255 is NaN. What was finished before stays."""
    from moet.checkpoint import Checkpoint

    info = Checkpoint.open(src).tensor_info("layers.2.ffn.experts.5.w2.scale")
    with info.file.open("r+b") as file:
        file.seek(info.offset + 3)
        file.write(b"\xff")
    with pytest.raises(MoetError, match="down|w2"):
        pack_local(src, tmp_path / "dst")
    assert {p.name for p in (tmp_path / "dst" / "experts").iterdir()} == {
        f"{k}-00{i}.safetensors" for k in ("base", "native") for i in (0, 1)
    }
    assert not list((tmp_path / "dst" / ".moet").glob("tmp-*"))


def test_biased_model_is_refused(tmp_path):
    """Experts whose values are all of one sign: the 2-bit mean is off, and a model of such matrices does not
    work."""
    src = tmp_path / "src"
    SOURCES["bf16"](src)
    from moet.checkpoint import Checkpoint

    checkpoint = Checkpoint.open(src)
    for name in checkpoint.names:
        if ".experts." in name:
            info = checkpoint.tensor_info(name)
            with info.file.open("r+b") as file:
                file.seek(info.offset)
                file.write(b"\x40\x3f" * (info.nbytes // 2))  # 0.75
    with pytest.raises(QuantizeError, match="sign bias"):
        pack_local(src, tmp_path / "dst")


# Versions


@pytest.mark.parametrize(
    "version, way",
    [(3, "a newer moet reads it"), (1, "pack the checkpoint again"), ("x", "pack the checkpoint again")],
)
def test_other_format_version(made, tmp_path, version, way):
    from pack_cases import copy

    pack = copy(made / "dst", tmp_path / "pack")
    other = json.loads((pack / "moet.json").read_text()) | {"moet": version, "something": "new"}
    (pack / "moet.json").write_text(json.dumps(other))
    for use in (lambda: Pack.open(pack), lambda: pack_local(made / "src", pack)):
        with pytest.raises(PackError, match=f"expected pack format 2, found format {version}; {way}"):
            use()


def forged(made, change) -> bytes:
    """A moet.json with a right digest and wrong contents."""
    import msgspec

    good = manifest.decode((made / "dst" / "moet.json").read_bytes())
    first = good.layers[0]
    return manifest.encode(change(good, first, msgspec.structs.replace))


@pytest.mark.parametrize("name", ["/etc/passwd", "../outside", "a/../../b", "a//b", ""])
def test_names_that_lead_out_of_the_folder(made, name):
    with pytest.raises(PackError, match="names of files inside the pack"):
        manifest.decode(forged(made, lambda m, _, new: new(m, files={**m.files, name: m.files["config.json"]})))
    with pytest.raises(PackError, match="names of files inside the pack"):
        manifest.decode(forged(made, lambda m, x, new: new(m, layers=(new(x, base=new(x.base, file=name)),))))


def test_contents_that_do_not_fit_together(made):
    with pytest.raises(PackError, match="for each of 9 experts, found 8"):
        manifest.decode(forged(made, lambda m, x, new: new(m, layers=(new(x, experts=9),))))
    with pytest.raises(PackError, match="ascending order"):
        manifest.decode(forged(made, lambda m, x, new: new(m, layers=(x, x))))


def test_unknown_field_is_refused(made):
    data = json.loads((made / "dst" / "moet.json").read_text())
    data["layers"][0]["base"]["stride"] = 4
    with pytest.raises(PackError, match="unknown field `stride`"):
        manifest.decode(json.dumps(data).encode())
