"""A stop that drains ends in time. vLLM kills the engine at the very moment the time to drain is over: requests that still run never get an end, so the
API server waits for them for ever, and workers cannot save their heat. Here what still runs is aborted shortly before."""

import functools
import time
from typing import Any

from vllm.logger import init_logger

from moet.engine.vllm import run as runs

logger = init_logger("vllm.moet")
MARGIN_SECONDS = 3.0
"""For the aborted requests' last outputs and the workers' own end. Of a short timeout, half."""


def drain_seconds(timeout: float) -> float:
    """How long requests may go on after a stop was asked for, of --shutdown-timeout seconds in all."""
    return max(timeout - MARGIN_SECONDS, timeout / 2)


def install() -> None:
    from vllm.v1.engine.core import EngineCoreProc, EngineShutdownState
    from vllm.v1.request import RequestStatus

    original = EngineCoreProc._handle_shutdown

    @functools.wraps(original)
    def handle_shutdown(self: Any) -> bool:
        timeout = self.vllm_config.shutdown_timeout
        if self.shutdown_state == EngineShutdownState.SHUTTING_DOWN and timeout > 0 and runs.of(self.vllm_config) is not None:
            began = self.__dict__.setdefault("_moet_drain_began", time.monotonic())
            if time.monotonic() - began > drain_seconds(timeout) and self.scheduler.get_num_unfinished_requests():
                logger.warning("moet: stopping: %d request(s) aborted", self.scheduler.get_num_unfinished_requests())
                self._send_abort_outputs(self.scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED))
        return original(self)

    EngineCoreProc._handle_shutdown = handle_shutdown
