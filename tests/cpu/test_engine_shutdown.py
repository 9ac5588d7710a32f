"""A stop that drains aborts what still runs before vLLM kills the engine."""

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")
from moet.config import MoetConfig
from moet.engine.vllm import shutdown
from moet.engine.vllm.run import Run


@pytest.fixture
def core(monkeypatch, tmp_path):
    """An engine core with one endless request, asked to stop with 10 s to drain; `core.clock` is the time."""
    from vllm.v1.engine.core import EngineCoreProc, EngineShutdownState

    monkeypatch.setattr(EngineCoreProc, "_handle_shutdown", lambda self: bool(self.running))
    shutdown.install()
    made = SimpleNamespace(running=["r"], sent=[], clock=0.0, shutdown_state=EngineShutdownState.SHUTTING_DOWN)
    made.vllm_config = SimpleNamespace(shutdown_timeout=10, additional_config=Run(str(tmp_path), True, MoetConfig(), str(tmp_path)))

    def finish(ids, status):
        finished, made.running = made.running, []
        return finished

    made.scheduler = SimpleNamespace(get_num_unfinished_requests=lambda: len(made.running), finish_requests=finish)
    made._send_abort_outputs = made.sent.extend
    monkeypatch.setattr(shutdown.time, "monotonic", lambda: made.clock)
    made.handle = lambda: EngineCoreProc._handle_shutdown(made)
    return made


def test_requests_may_go_on_until_shortly_before_the_kill(core):
    assert core.handle()
    core.clock = 6.9
    assert core.handle() and not core.sent
    core.clock = 7.1
    assert not core.handle() and core.sent == ["r"]


def test_without_moet_nothing_changes(core):
    core.vllm_config.additional_config = {}
    core.handle()
    core.clock = 9.9
    assert core.handle() and not core.sent


def test_a_short_timeout_leaves_half_of_it():
    assert shutdown.drain_seconds(2) == 1 and shutdown.drain_seconds(10) == 7
