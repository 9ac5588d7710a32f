"""The cache of packs: found by content, least recently used first out, never one that is in use."""

import json
import os
import shutil
import subprocess
import sys
import time

import pytest
from typer.testing import CliRunner

from moet.cli.cache import app
from moet.engine import packcache
from moet.engine.packcache import PackCache
from moet.errors import CheckpointError, ConfigError
from tests.generators import write_qwen3_moe


@pytest.fixture
def cache(tmp_path):
    """Three packs of 1000 bytes, used 30, 20 and 10 seconds ago."""
    cache = PackCache(tmp_path / "cache")
    for name, age in (("old", 30), ("middle", 20), ("new", 10)):
        fill(cache, name)
        os.close(cache.hold(name))
        then = time.time() - age
        os.utime(cache.root / f"{name}.lock", (then, then))
    return cache


def fill(cache, name, size=1000):
    path = cache.path(name)
    path.mkdir(parents=True)
    (path / "moet.json").write_bytes(b"x" * size)


def names(cache):
    return [e.name for e in cache.entries()]


def test_a_key_is_of_the_content(tmp_path):
    a, b, c = tmp_path / "a", tmp_path / "other-name", tmp_path / "c"
    a.mkdir()
    write_qwen3_moe(a)
    shutil.copytree(a, b)
    for path in b.iterdir():
        os.utime(path, (1, 1))
    assert packcache.local_key(a) == packcache.local_key(b)
    c.mkdir()
    write_qwen3_moe(c, seed=1)  # same names and shapes, other values
    assert packcache.local_key(c) != packcache.local_key(a)


def test_a_checkpoint_that_lacks_a_shard_has_no_key(tmp_path):
    write_qwen3_moe(tmp_path)
    next(tmp_path.glob("*.safetensors")).unlink()
    with pytest.raises(CheckpointError, match="found none"):
        packcache.local_key(tmp_path)


def test_entries_are_least_recently_used_first(cache):
    assert names(cache) == ["old", "middle", "new"]
    os.close(cache.hold("old"))
    assert names(cache) == ["middle", "new", "old"]


def test_prune_removes_what_was_not_used_for_longest(cache):
    assert [e.name for e in cache.prune(2000)] == ["old"]
    assert [e.name for e in cache.prune(2000)] == []
    assert [e.name for e in cache.prune(0, keep="middle")] == ["new"]
    assert names(cache) == ["middle"]
    assert sorted(p.name for p in cache.root.iterdir()) == ["middle", "middle.lock"]


def test_a_pack_in_use_stays(cache):
    # another process holds it, as a server does
    code = "import sys, pathlib; from moet.engine.packcache import PackCache; PackCache(pathlib.Path(sys.argv[1])).hold('old'); print('held', flush=True); sys.stdin.read()"
    holder = subprocess.Popen([sys.executable, "-c", code, str(cache.root.parent)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout.readline() == "held\n"
        assert {e.name: e.state for e in cache.entries()} == {"old": "in use", "middle": "ready", "new": "ready"}
        assert [e.name for e in cache.prune(0)] == ["middle", "new"]
    finally:
        holder.communicate("")
    assert [e.name for e in cache.prune(0)] == ["old"]


def test_the_hold_outlives_exec(cache):
    code = (
        "import os, sys, pathlib; from moet.engine.packcache import PackCache; PackCache(pathlib.Path(sys.argv[1])).hold('old');"
        "os.execv('/bin/sh', ['sh', '-c', 'echo held; read x'])"
    )
    holder = subprocess.Popen([sys.executable, "-c", code, str(cache.root.parent)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout.readline() == "held\n"
        assert not cache.remove("old")
    finally:
        holder.communicate("x\n")
    assert cache.remove("old")


def test_an_unfinished_pack_is_named(cache):
    (cache.path("old") / "moet.json").unlink()
    assert {e.name: e.state for e in cache.entries()}["old"] == "unfinished"


def test_commands(cache):
    where = ["--cache-dir", str(cache.root.parent)]
    listed = CliRunner().invoke(app, ["list", "--json", *where])
    assert [(e["name"], e["bytes"], e["state"]) for e in json.loads(listed.stdout)] == [(n, 1000, "ready") for n in ("old", "middle", "new")]
    assert "3 packs" in CliRunner().invoke(app, ["list", *where]).stdout
    pruned = CliRunner().invoke(app, ["prune", "--max-gib", str(1500 / 2**30), *where])
    assert pruned.exit_code == 0 and "2 packs removed" in pruned.stdout
    assert "1 packs removed" in CliRunner().invoke(app, ["clean", *where]).stdout
    assert cache.entries() == []


@pytest.mark.parametrize(("text", "size"), [("1.5", 3 << 29), ("2GiB", 2 << 30), (" 0.5 gib", 1 << 29)])
def test_sizes(text, size):
    assert packcache.parse_gib(text, "--ram") == size


@pytest.mark.parametrize("text", ["", "much", "-1", "1TB", "nan", "inf"])
def test_no_sizes(text):
    with pytest.raises(ConfigError, match="--ram"):
        packcache.parse_gib(text, "--ram")
