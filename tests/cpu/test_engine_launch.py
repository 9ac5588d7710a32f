"""`moet serve --print`: the exact command, environment and settings, without doing anything."""

import json
import subprocess
import sys

import pytest

from moet.cli.serve import budget
from moet.engine import launch
from moet.errors import ConfigError, EngineError
from tests.generators import write_qwen3_moe


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "tiny"
    folder.mkdir()
    write_qwen3_moe(folder)
    return folder


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    for name in ("OMP_NUM_THREADS", "TRITON_INTERPRET", "VLLM_USE_V2_MODEL_RUNNER", "VLLM_PLUGINS", "VLLM_CPU_KVCACHE_SPACE"):
        monkeypatch.delenv(name, raising=False)


def serve(*arguments, status=0):
    done = subprocess.run([sys.executable, "-m", "moet", "serve", *map(str, arguments)], capture_output=True, text=True, check=False)
    assert done.returncode == status, done.stderr
    return json.loads(done.stdout) if status == 0 else done.stderr


def option(command, name):
    return command[command.index(name) + 1]


def test_a_checkpoint_is_packed_first(checkpoint, tmp_path):
    start = serve(checkpoint, "--print", "--ram", "25%", "--cache-dir", tmp_path, "--", "--port", "1234")
    assert start["command"][:4] == [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve"]
    assert start["command"][4] == start["model"] and start["model"].startswith(f"{tmp_path}/packs/tiny-") and start["model"].endswith("-base")
    assert json.loads(option(start["command"], "--additional-config")) == {"moet": {"ram_percent": 25.0}}
    assert option(start["command"], "--served-model-name") == "tiny"
    assert start["command"][-2:] == ["--port", "1234"]
    assert "does not exist yet" in start["notes"][0]
    assert list(tmp_path.iterdir()) == []


def test_native_needs_another_pack(checkpoint, tmp_path):
    base = serve(checkpoint, "--print", "--cache-dir", tmp_path)
    native = serve(checkpoint, "--print", "--cache-dir", tmp_path, "--precision", "native")
    assert base["model"] == native["model"] + "-base"
    assert native["settings"] == {"precision": "native"}


def test_direct_serves_the_checkpoint(checkpoint):
    start = serve(checkpoint, "--print", "--direct")
    assert start["model"] == str(checkpoint)
    assert json.loads(option(start["command"], "--additional-config")) == {"moet": {}}


def test_a_pack_is_served_as_it_is(checkpoint, tmp_path):
    subprocess.run([sys.executable, "-m", "moet", "pack", str(checkpoint), str(tmp_path / "p"), "--no-calibrate"], check=True, capture_output=True)
    assert serve(tmp_path / "p", "--print")["model"] == str(tmp_path / "p")
    assert "leave --direct out" in serve(tmp_path / "p", "--print", "--direct", status=2)


def test_what_the_user_says_wins(checkpoint):
    plain = serve(checkpoint, "--print", "--direct")["command"]
    assert {"--enforce-eager", "--kv-cache-memory-bytes", "--shutdown-timeout"} <= set(plain)
    mine = ["--kv_cache_memory_bytes=7", "--no-enforce-eager", "--served-model-name", "me", "--shutdown-timeout", "3"]
    command = serve(checkpoint, "--print", "--direct", "--", *mine)["command"]
    assert command[-len(mine) :] == mine
    assert not {"--enforce-eager", "--kv-cache-memory-bytes", "tiny"} & set(command)
    assert command.count("--shutdown-timeout") == 1


def test_several_ranks_share_the_cores(checkpoint):
    environment = serve(checkpoint, "--print", "--direct", "--", "--tensor-parallel-size=2")["environment"]
    assert environment["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    assert int(environment["OMP_NUM_THREADS"]) >= 1


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--precision", "half"], "moet.precision"),
        (["--ram", "0"], "more than 0 GiB"),
        (["--ram", "101%"], "at most 100%"),
        (["--gpu", "0"], "more than 0 GiB"),
        (["--io-threads", "0"], "moet.io_threads"),
        (["--", "--additional-config", "{}"], "--additional-config"),
    ],
)
def test_refusals(checkpoint, arguments, text):
    assert text in serve(checkpoint, "--print", "--direct", *arguments, status=2)


def test_what_is_no_model(tmp_path):
    assert "expected a pack, a checkpoint folder or a Hub id" in serve(tmp_path / "nothing", "--print", status=1)


def test_plugins_that_leave_moet_out_are_refused(monkeypatch):
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    with pytest.raises(EngineError, match="VLLM_PLUGINS"):
        launch.check_plugins()
    monkeypatch.setenv("VLLM_PLUGINS", "other,moet")
    launch.check_plugins()


def test_the_callers_environment_wins(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert "OMP_NUM_THREADS" not in launch.cpu_environment(["-tp", "2"])


@pytest.mark.parametrize(("ram", "values"), [("auto", {}), ("100%", {}), ("12.5%", {"ram_percent": 12.5}), ("1.5", {"ram_gib": 1.5}), ("2GiB", {"ram_gib": 2.0})])
def test_budgets(ram, values):
    assert budget(ram) == values


@pytest.mark.parametrize("ram", ["0%", "-1%", "x%", "", "lots", "0"])
def test_no_budgets(ram):
    with pytest.raises(ConfigError, match="--ram"):
        budget(ram)


@pytest.mark.parametrize(
    ("extra", "options", "found"),
    [
        (["--a", "1"], ["--a"], True),
        (["--a_b=1"], ["--a-b"], True),
        (["--a.key", "1"], ["--a"], True),
        (["-O3"], ["-O"], True),
        (["--ab"], ["--a"], False),
        (["a"], ["--a"], False),
    ],
)
def test_given(extra, options, found):
    assert launch.given(extra, *options) is found


@pytest.mark.parametrize("ranks", ["foo", "0", "-1", "1.5", ""])
def test_a_silly_number_of_ranks_is_refused(ranks):
    with pytest.raises(ConfigError, match="--tensor-parallel-size"):
        launch.cpu_environment(["-tp", ranks])
