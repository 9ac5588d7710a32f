"""Packing from shards that arrive while it runs: a folder that a download fills, and a Hub server (a local
one that speaks the Hub's HTTP)."""

import hashlib
import json
import shutil
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from pack_cases import SOURCES, contents, copy, pack_local

from moet.checkpoint.sources_remote import GrowingSource, HubSource, is_hub_id, shard_state
from moet.errors import CheckpointError, ConfigError
from moet.pack import durable
from moet.pack.packer import pack

SHARDS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    root = tmp_path_factory.mktemp("made")
    SOURCES["mxfp4"](root / "src")
    pack_local(root / "src", root / "dst")
    return root


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(GrowingSource, "POLL", 0.02)


# A folder that is being downloaded


def begun(made, tmp_path, without=SHARDS) -> Path:
    src = copy(made / "src", tmp_path / "src")
    for name in without:
        (src / name).unlink()
    return src


def test_a_complete_folder_needs_no_patience(made, tmp_path):
    pack(GrowingSource(made / "src", patience=0), tmp_path / "dst")
    assert contents(tmp_path / "dst") == contents(made / "dst")


@pytest.mark.parametrize("how", ["in place", "huggingface_hub", "aria2"])
def test_shards_that_arrive_late(made, tmp_path, how):
    src = begun(made, tmp_path)
    said = []

    def download():
        for name in reversed(SHARDS):
            data = (made / "src" / name).read_bytes()
            target = src / name
            if how == "huggingface_hub":
                target = src / ".cache" / "huggingface" / "download" / f"x.{name}.incomplete"
                target.parent.mkdir(parents=True, exist_ok=True)
            if how == "aria2":
                (src / f"{name}.aria2").write_bytes(b"control")
                target.write_bytes(data[:1000] + bytes(len(data) - 1000))  # full size at once, zeros inside
            with target.open("r+b" if how == "aria2" else "wb") as file:
                for i in range(0, len(data), len(data) // 7):
                    file.write(data[i : i + len(data) // 7])
                    file.flush()
                    time.sleep(0.06)
            if how == "huggingface_hub":
                target.rename(src / name)
            (src / f"{name}.aria2").unlink(missing_ok=True)

    thread = threading.Thread(target=download)
    thread.start()
    pack(GrowingSource(src, patience=20, waiting=said.append), tmp_path / "dst")
    thread.join()
    assert contents(tmp_path / "dst") == contents(made / "dst")
    assert any("waiting for model-0000" in text for text in said)


def test_index_and_config_may_come_late_too(made, tmp_path):
    src = tmp_path / "src"
    (src / ".cache" / "huggingface" / "download").mkdir(parents=True)

    def download():
        time.sleep(0.2)
        for name in (
            "config.json",
            "model.safetensors.index.json",
            *SHARDS,
            "tokenizer.json",
            "tokenizer_config.json",
            "chat_template.jinja",
        ):
            if (made / "src" / name).exists():
                shutil.copy(made / "src" / name, src / f"{name}.part")
                (src / f"{name}.part").rename(src / name)

    thread = threading.Thread(target=download)
    thread.start()
    source = GrowingSource(src, patience=20)
    thread.join()
    pack(source, tmp_path / "dst")
    assert contents(tmp_path / "dst") == contents(made / "dst")


def test_lack_of_progress_is_an_error_that_says_what_is_missing(made, tmp_path):
    src = begun(made, tmp_path, [SHARDS[1]])
    half = (made / "src" / SHARDS[1]).read_bytes()[:5000]
    marker = src / ".cache" / "huggingface" / "download" / "y.incomplete"
    marker.parent.mkdir(parents=True)
    marker.write_bytes(half)
    with pytest.raises(
        CheckpointError,
        match=rf"{SHARDS[1]}: .*it is not there.*1 unfinished downloads there, e.g. y.incomplete.*Start the download again",
    ):
        pack(GrowingSource(src, patience=0.3), tmp_path / "dst")
    (src / SHARDS[1]).write_bytes(half)
    with pytest.raises(CheckpointError, match="damaged or incomplete"):
        pack(GrowingSource(src, patience=0.3), tmp_path / "dst")
    shutil.copy(made / "src" / SHARDS[1], src)
    pack(GrowingSource(src, patience=0.3), tmp_path / "dst")  # goes on with what it had
    assert contents(tmp_path / "dst") == contents(made / "dst")


def test_a_folder_in_which_nothing_happens_fails_at_once(made, tmp_path):
    import os

    src = begun(made, tmp_path, [SHARDS[0]])
    for path in (*src.iterdir(), src):
        os.utime(path, (time.time() - 3600,) * 2)
    begin = time.monotonic()
    with pytest.raises(CheckpointError, match="Nothing in .* has changed for 3[56]\\d\\d s"):
        GrowingSource(src, patience=100).fetch(SHARDS[0])
    assert time.monotonic() - begin < 5


def test_shard_state(made, tmp_path):
    path = tmp_path / SHARDS[0]
    assert shard_state(path) == "it is not there"
    shutil.copy(made / "src" / SHARDS[0], path)
    assert shard_state(path) == ""
    (tmp_path / f"{SHARDS[0]}.aria2").touch()
    assert "being written" in shard_state(path)


# --consume


def test_consume_deletes_a_shard_once_all_of_it_is_on_disk(made, tmp_path, monkeypatch):
    src, dst = copy(made / "src", tmp_path / "src"), tmp_path / "dst"
    synced, released = [], []
    real_sync, real_release = durable.os.fsync, GrowingSource.release

    def release(self, shard):
        named = json.loads((dst / ".moet" / "journal.json").read_text())
        assert shard in named["dense"], "deleted before its dense tensors were on disk"
        released.append((shard, len(synced)))
        real_release(self, shard)

    monkeypatch.setattr(durable.os, "fsync", lambda fd: (synced.append(fd), real_sync(fd)))
    monkeypatch.setattr(GrowingSource, "release", release)
    pack(GrowingSource(src, patience=0, consume=True), dst, consume=True)
    assert contents(dst) == contents(made / "dst")
    assert not list(src.glob("*.safetensors")) and (src / "config.json").exists()
    assert released[0][1] < released[-1][1], "all shards were kept until the end"


def test_a_local_folder_is_kept_without_consume(made, tmp_path):
    src = copy(made / "src", tmp_path / "src")
    before = contents(src)
    pack(GrowingSource(src, patience=0), tmp_path / "dst")
    assert contents(src) == before


@pytest.mark.parametrize("step", range(1, 29, 3))
def test_consume_stopped_anywhere_goes_on_without_the_shards_that_are_gone(made, tmp_path, monkeypatch, step):
    from test_pack_resume import Stop, stop_at

    src, dst = copy(made / "src", tmp_path / "src"), tmp_path / "dst"
    with monkeypatch.context() as m:
        stop_at(m, step)
        with pytest.raises(Stop):
            pack(GrowingSource(src, patience=0, consume=True), dst, consume=True)
    pack(GrowingSource(src, patience=0, consume=True), dst, consume=True)
    assert contents(dst) == contents(made / "dst")


# The Hub


class Hub:
    """Serves one repository as the Hub does: model info, HEAD and GET of /resolve/, ETag and commit headers,
    ranges."""

    def __init__(self, root: Path, commit: str = "a" * 40) -> None:
        self.root, self.commit, self.requests, self.fail_on = root, commit, [], ""
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_):
                pass

            def do_HEAD(self):
                self.answer(body=False)

            def do_GET(self):
                self.answer(body=True)

            def answer(self, body):
                hub.requests.append((self.command, self.path))
                if self.path.startswith("/api/models/org/model"):
                    files = [
                        {"rfilename": p.relative_to(hub.root).as_posix()}
                        for p in sorted(hub.root.rglob("*"))
                        if p.is_file()
                    ]
                    return self.send(
                        200,
                        json.dumps({"id": "org/model", "sha": hub.commit, "siblings": files}).encode(),
                        {},
                        body,
                    )
                prefix = f"/org/model/resolve/{hub.commit}/"
                path = hub.root / self.path.removeprefix(prefix)
                if (
                    not self.path.startswith(prefix)
                    or not path.is_file()
                    or (hub.fail_on and hub.fail_on in self.path)
                ):
                    return self.send(
                        404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": hub.commit}, body
                    )
                data = path.read_bytes()
                headers = {
                    "ETag": f'"{hashlib.sha256(data).hexdigest()}"',
                    "X-Repo-Commit": hub.commit,
                    "Accept-Ranges": "bytes",
                }
                start = int((self.headers.get("Range") or "bytes=0-").split("=")[1].split("-")[0])
                if start:
                    headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
                self.send(206 if start else 200, data[start:], headers, body)

            def send(self, code, data, headers, body):
                self.send_response(code)
                for key, value in {"Content-Length": str(len(data)), **headers}.items():
                    self.send_header(key, value)
                self.end_headers()
                if body:
                    self.wfile.write(data)

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def downloads(self) -> list[str]:
        return [
            path.rsplit("/", 1)[-1]
            for method, path in self.requests
            if method == "GET" and "/resolve/" in path
        ]


@pytest.fixture
def hub(made, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    for name in ("HF_HUB_CACHE", "HF_XET_CACHE"):
        monkeypatch.setattr(f"huggingface_hub.constants.{name}", str(tmp_path / "hub-cache"))
    server = Hub(made / "src")
    yield server
    server.server.shutdown()


def test_hub_shard_by_shard(made, hub, tmp_path):
    source = HubSource("org/model", endpoint=hub.url, store=tmp_path / "store")
    assert not set(SHARDS) & set(hub.downloads()), "shards must wait until they are asked for"
    pack(source, tmp_path / "dst")
    assert contents(tmp_path / "dst") == contents(made / "dst")
    assert [name for name in hub.downloads() if name in SHARDS] == SHARDS


def test_hub_consume_never_holds_what_is_used_up(made, hub, tmp_path):
    dst = tmp_path / "dst"
    source = HubSource("org/model", endpoint=hub.url, store=dst / ".moet" / "download", consume=True)
    pack(source, dst, consume=True)
    assert contents(dst) == contents(made / "dst") and not (dst / ".moet").exists()


def test_hub_failure_and_rerun_downloads_no_shard_twice(made, hub, tmp_path):
    dst = tmp_path / "dst"
    hub.fail_on = SHARDS[1]
    with pytest.raises(CheckpointError, match=f"{SHARDS[1]}: the Hub did not give it"):
        pack(
            HubSource("org/model", endpoint=hub.url, store=dst / ".moet" / "download", consume=True),
            dst,
            consume=True,
        )
    hub.fail_on = ""
    pack(
        HubSource("org/model", endpoint=hub.url, store=dst / ".moet" / "download", consume=True),
        dst,
        consume=True,
    )
    assert contents(dst) == contents(made / "dst")
    assert sorted(name for name in hub.downloads() if name in SHARDS) == SHARDS


def test_hub_downloads_the_next_shard_while_this_one_is_packed(made, hub, tmp_path, monkeypatch):
    """The second shard's download has begun before the first layer is written, and it is not downloaded again."""
    from moet.pack import packer

    seen = []
    real = packer.write_layer

    def write_layer(*arguments, **named):
        for _ in range(500):
            if SHARDS[1] in hub.downloads():
                break
            time.sleep(0.01)
        seen.append(hub.downloads().count(SHARDS[1]))
        return real(*arguments, **named)

    monkeypatch.setattr(packer, "write_layer", write_layer)
    pack(HubSource("org/model", endpoint=hub.url, store=tmp_path / "store"), tmp_path / "dst")
    assert set(seen) == {1}
    assert contents(tmp_path / "dst") == contents(made / "dst")


def test_hub_rerun_stays_at_the_commit_it_began_with(hub, tmp_path):
    first = HubSource("org/model", endpoint=hub.url, store=tmp_path / "store")
    asked = len(hub.requests)
    HubSource("org/model", endpoint=hub.url, store=tmp_path / "store")
    assert any(path.endswith(f"/revision/{first.commit}") for _, path in hub.requests[asked:])


def test_hub_errors(hub, tmp_path):
    with pytest.raises(CheckpointError, match="model org/none: the Hub did not give it"):
        HubSource("org/none", endpoint=hub.url)
    with pytest.raises(ConfigError, match="shared cache"):
        HubSource("org/model", endpoint=hub.url, consume=True)


def test_what_is_a_hub_id(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "here").mkdir(parents=True)
    assert is_hub_id("org/model") and not is_hub_id("org/here")
    assert not any(map(is_hub_id, ("model", "/org/model", "./model", "a/b/c", "~/model", "org/")))
