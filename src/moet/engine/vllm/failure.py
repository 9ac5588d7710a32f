"""A row that cannot be read must fail the requests that needed it, and only those: not the server, and never as wrong text.

On the worker's side a failed layer gives zeros, so that every collective still runs, and counts up a word in a page that all ranks and the
engine core map. The engine core reads the words with each step's output. All ranks wrote theirs before that output existed: the layer's
all-reduce comes after the word. Every request with a step in flight then finishes with an error (later steps may have been launched already,
on blocks of the failed one), and the prefix cache is emptied: vLLM puts blocks there at scheduling, before they are computed.
"""

import functools
import mmap
import os
import struct
from pathlib import Path
from typing import Any

from vllm.logger import init_logger

from moet.engine.vllm import run as runs

logger = init_logger("vllm.moet")
RANKS, SLOT = 64, 1024  # per rank: uint64 count, then UTF-8 text, NUL-padded


class Words:
    """The page. Opened by workers and by the engine core; whoever comes first makes it."""

    def __init__(self, run_dir: str) -> None:
        path = Path(run_dir) / "failures"
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(fd, RANKS * SLOT)
            self.page = mmap.mmap(fd, RANKS * SLOT)
        finally:
            os.close(fd)

    def add(self, rank: int, message: str) -> None:
        base = rank * SLOT
        text = message.encode()[: SLOT - 9]
        self.page[base + 8 : base + SLOT] = text.ljust(SLOT - 8, b"\0")
        struct.pack_into("<Q", self.page, base, self.count(rank) + 1)

    def count(self, rank: int) -> int:
        return struct.unpack_from("<Q", self.page, rank * SLOT)[0]

    def counts(self, world: int) -> tuple[int, ...]:
        return tuple(self.count(rank) for rank in range(world))

    def message(self, rank: int) -> str:
        return self.page[rank * SLOT + 8 : (rank + 1) * SLOT].rstrip(b"\0").decode(errors="replace")


def install() -> None:
    from vllm.v1.core.sched.scheduler import Scheduler

    original = Scheduler.update_from_output

    @functools.wraps(original)
    def update_from_output(self: Any, scheduler_output: Any, model_runner_output: Any) -> Any:
        failed = newly_failed(self)
        if not failed:
            return original(self, scheduler_output, model_runner_output)
        finished = fail_in_flight(self, scheduler_output, failed)
        outputs = original(self, scheduler_output, model_runner_output)
        return with_errors(outputs, finished)

    Scheduler.update_from_output = update_from_output


def newly_failed(scheduler: Any) -> str:
    """Text of a failure since the last call, "" if there was none."""
    run = runs.of(scheduler.vllm_config)
    if run is None:
        return ""
    state = scheduler.__dict__.setdefault("_moet_failures", {})
    world = scheduler.vllm_config.parallel_config.tensor_parallel_size
    if not state:
        state["words"] = Words(run.run_dir)
        state["seen"] = (0,) * world
    counts = state["words"].counts(world)
    if counts == state["seen"]:
        return ""
    rank = next(r for r in range(world) if counts[r] != state["seen"][r])
    state["seen"] = counts
    return state["words"].message(rank)


def fail_in_flight(scheduler: Any, scheduler_output: Any, reason: str) -> list[Any]:
    from vllm.v1.request import RequestStatus

    ids = {r.request_id for r in scheduler.requests.values() if r.status == RequestStatus.RUNNING or r.num_in_flight_tokens > 0}
    ids |= set(scheduler_output.num_scheduled_tokens)
    scheduler.kv_cache_manager.evict_blocks(set(range(scheduler.kv_cache_config.num_blocks)))
    finished = scheduler.finish_requests(ids, RequestStatus.FINISHED_ERROR)
    logger.error("moet: %d request(s) failed because an expert row could not be read: %s", len(finished), reason)
    return finished


def with_errors(outputs: dict[int, Any], finished: list[Any]) -> dict[int, Any]:
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs

    for request in finished:
        output = EngineCoreOutput(
            request_id=request.request_id,
            new_token_ids=[],
            finish_reason=request.get_finished_reason(),
            events=request.take_events(),
            trace_headers=request.trace_headers,
        )
        if request.client_index not in outputs:
            outputs[request.client_index] = EngineCoreOutputs()
        outputs[request.client_index].outputs.append(output)
    return outputs
