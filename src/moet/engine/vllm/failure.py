"""A row that cannot be read must fail the requests that needed it, and only those: not the server, and never as wrong text.

On the worker's side a failed layer gives zeros, so that every collective still runs, and counts up a word in a page that all ranks and the
engine core map. On a GPU the kernel counts, in a page of its own that is pinned (so it is on tmpfs; moet.store.failures), and a thread of the worker says why. The engine
core reads the words with each step's output. All ranks wrote theirs before that output existed: the layer's all-reduce comes after the word. Every request with a step in flight then finishes with an error (later steps may have been launched already,
on blocks of the failed one), and the prefix cache is emptied: vLLM puts blocks there at scheduling, before they are computed. Nothing new is scheduled until the steps in flight are done: what they still
report is then no newer request's failure.
"""

import functools
import mmap
import struct
import time
from pathlib import Path
from typing import Any

from vllm.logger import init_logger

from moet.engine.vllm import run as runs
from moet.errors import EngineError
from moet.store.failures import STRIDE, shared_page

logger = init_logger("vllm.moet")
# Per rank: uint64 count; of a GPU's own count: uint64 up to which the text is about it, uint64 of the start; float64 when the text was written, of the machine's
# monotonic clock; UTF-8 text, NUL-padded.
RANKS, SLOT, SAID, TEXT = 64, 1024, 24, 32
LATE = "an expert row did not reach the GPU: no progress within moet.wait_limit_s"
TELL_SECONDS = 0.5  # the worker's thread looks every 0.05 s


class Words:
    """The page. Opened by workers and by the engine core; whoever comes first makes it. device_path: the GPU's words, another file beside it. Raises EngineError."""

    def __init__(self, run_dir: str) -> None:
        self.device_path = Path(run_dir) / "failures.gpu"
        self.device: mmap.mmap | None = None
        path = Path(run_dir) / "failures"
        try:
            self.page = shared_page(path, RANKS * SLOT)
        except OSError as e:
            raise EngineError(f"{path}: expected {RANKS * SLOT} bytes to count failed rows in, found: {e.strerror}; make room there (containers: --shm-size), or set moet.run_dir") from e

    def add(self, rank: int, message: str) -> None:
        """A failure on a CPU: text first, then the count."""
        self._say(rank, message)
        struct.pack_into("<Q", self.page, rank * SLOT, self._count(rank) + 1)

    def tell(self, rank: int, message: str, count: int) -> None:
        """Why the GPU of this rank has counted to `count`."""
        self._say(rank, message)
        struct.pack_into("<Q", self.page, rank * SLOT + 8, count)

    def forgive(self, rank: int) -> None:
        """What the GPU could not read so far was no request's: slots were filled ahead. It fails again, and aloud, when a request asks for it."""
        struct.pack_into("<QQ", self.page, rank * SLOT + 8, self.device_count(rank), self.device_count(rank))

    def _say(self, rank: int, message: str) -> None:
        base = rank * SLOT
        struct.pack_into("<d", self.page, base + SAID, time.monotonic())
        self.page[base + TEXT : base + SLOT] = message.encode()[: SLOT - TEXT - 1].ljust(SLOT - TEXT, b"\0")

    def _count(self, rank: int) -> int:
        return struct.unpack_from("<Q", self.page, rank * SLOT)[0]

    def told(self, rank: int) -> int:
        return struct.unpack_from("<Q", self.page, rank * SLOT + 8)[0]

    def device_count(self, rank: int) -> int:
        """0 where there is no GPU."""
        if self.device is None:
            try:
                with open(self.device_path, "rb") as file:
                    self.device = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            except (FileNotFoundError, ValueError):  # not there, or not a byte long, yet
                return 0
        offset = rank * STRIDE
        return struct.unpack_from("<I", self.device, offset)[0] if offset < len(self.device) else 0

    def count(self, rank: int) -> int:
        return self._count(rank) + self.device_count(rank) - struct.unpack_from("<Q", self.page, rank * SLOT + 16)[0]

    def counts(self, world: int) -> tuple[int, ...]:
        return tuple(self.count(rank) for rank in range(world))

    def message(self, rank: int) -> str:
        """Of the last failure; the worker of a GPU may need a moment to say it."""
        until = time.monotonic() + TELL_SECONDS
        while self.told(rank) != (count := self.device_count(rank)) and time.monotonic() < until:
            time.sleep(0.01)
        if self.told(rank) != count:
            self.tell(rank, LATE, count)
        return self.page[rank * SLOT + TEXT : (rank + 1) * SLOT].rstrip(b"\0").decode(errors="replace")

    def last(self) -> str:
        """Why the newest failure of all ranks happened, "" if there was none."""
        texts = {rank: self.message(rank) for rank in range(RANKS) if self.count(rank)}
        said = {rank: struct.unpack_from("<d", self.page, rank * SLOT + SAID)[0] for rank in texts}
        return texts[max(texts, key=lambda rank: said[rank])] if texts else ""


def install() -> None:
    from vllm.v1.core.sched.scheduler import Scheduler

    original = Scheduler.update_from_output

    @functools.wraps(original)
    def update_from_output(self: Any, scheduler_output: Any, model_runner_output: Any) -> Any:
        failed = newly_failed(self)
        if not failed and not draining(self):
            return original(self, scheduler_output, model_runner_output)
        done = drain(self, scheduler_output)
        finished = fail_in_flight(self, scheduler_output, failed) if failed else []
        outputs = original(self, scheduler_output, model_runner_output)
        if done:
            resume(self)
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


def draining(scheduler: Any) -> bool:
    return "drain" in scheduler.__dict__.get("_moet_failures", {})


def drain(scheduler: Any, scheduler_output: Any) -> bool:
    """Counts down the tokens of the steps that were in flight when a failure was seen; whether this was the last of them."""
    state = scheduler._moet_failures
    if "drain" not in state:
        return False
    state["drain"] -= scheduler_output.total_num_scheduled_tokens
    return state["drain"] <= 0


def resume(scheduler: Any) -> None:
    del scheduler._moet_failures["drain"]
    scheduler.set_pause_state(scheduler._moet_failures.pop("paused"))


def fail_in_flight(scheduler: Any, scheduler_output: Any, reason: str) -> list[Any]:
    from vllm.v1.core.sched.interface import PauseState
    from vllm.v1.request import RequestStatus

    now = scheduler_output.num_scheduled_tokens
    later = sum(r.num_in_flight_tokens - now.get(r.request_id, 0) for r in scheduler.requests.values())
    if later > 0 and not draining(scheduler):
        scheduler._moet_failures |= {"drain": later, "paused": scheduler.pause_state}
        scheduler.set_pause_state(PauseState.PAUSED_ALL)
    ids = {r.request_id for r in scheduler.requests.values() if r.status == RequestStatus.RUNNING or r.num_in_flight_tokens > 0}
    ids |= set(now)
    finished = scheduler.finish_requests(ids, RequestStatus.FINISHED_ERROR)
    scheduler.kv_cache_manager.evict_blocks(set(range(scheduler.kv_cache_config.num_blocks)))
    if finished:
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
