"""Reads a GPU's counters once a second, beside the steps: into a file that /metrics shows. Keeps the heat file, and says why a row failed."""

import json
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from vllm.logger import init_logger

from moet.cache.heat import save_heat
from moet.engine.vllm.failure import LATE, Words
from moet.errors import MoetError

logger = init_logger("vllm.moet")
LOOK_SECONDS = 0.05  # at the failure word: plain memory
COUNTERS_SECONDS = 1.0
STORE_SECONDS = 5.0  # the store hears only of rows that were not in RAM: told what the GPU uses, it keeps that
HEAT_SECONDS = 60.0  # vLLM kills its workers when a server is stopped without --shutdown-timeout; then at most this much heat is lost


class Watch:
    """A thread that is started after the last graph was captured: a CUDA call of another thread breaks a capture.

    path: the counters, as JSON. heat: arguments of save_heat before the heat itself, or None: not kept. Reading counters orders nothing on the GPU after
    the steps in flight and waits for none of them (DeviceRuntime.counters).
    """

    def __init__(self, runtime: Any, store: Any, words: Words, rank: int, path: Path, heat: tuple[Path, str, str] | None) -> None:
        self.runtime, self.store, self.words, self.rank, self.path, self.heat = runtime, store, words, rank, path, heat
        self.ending = threading.Event()
        self.thread: threading.Thread | None = None
        self.failures = self.errors = self.timeouts = 0
        self.reason = LATE
        self.failing: set[str] = set()  # actions whose last try went wrong: said once

    def start(self) -> None:
        self.failures, self.errors = self.words.device_count(self.rank), self._errors()
        self.thread = threading.Thread(target=self._run, name="moet-watch", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        every = {self.count: COUNTERS_SECONDS, self.tell_store: STORE_SECONDS, self.save_heat: HEAT_SECONDS}
        now = time.monotonic()
        due = {action: now + seconds for action, seconds in every.items()}
        while not self.ending.wait(LOOK_SECONDS):
            self._try(self.explain)
            now = time.monotonic()
            for action, at in due.items():
                if now >= at:
                    due[action] = now + every[action]
                    self._try(action)

    def _try(self, action: Callable[[], None]) -> None:
        """What goes wrong now, for want of memory for a file, say, may go well later, and the other actions do not hang on it."""
        name = action.__name__
        try:
            action()
            self.failing.discard(name)
        except (OSError, RuntimeError, MoetError) as e:
            if name not in self.failing:
                logger.error("moet: %s: %s; it is tried again", name, e)
            self.failing.add(name)

    def _errors(self) -> int:
        counters = self.store.counters()
        return counters.io_errors + counters.checksum_failures

    def explain(self) -> None:
        """Says why the GPU has counted a failure since the last look."""
        count = self.words.device_count(self.rank)
        if count == self.failures:
            return
        self.failures = count
        errors, timeouts = self._errors(), self.runtime.counters().timeouts
        if timeouts > self.timeouts:
            self.reason = LATE
        elif errors != self.errors:
            self.reason = self.store.failure_text() or LATE
        # Else it is the reason of the look before: the store counts an error before the GPU counts its row, and of a step that gave up only the first wait is counted.
        self.errors, self.timeouts = errors, timeouts
        self.words.tell(self.rank, self.reason, count)
        logger.error("moet: %s", self.reason)

    def count(self) -> None:
        write(self.path, asdict(self.runtime.counters()))

    def tell_store(self) -> None:
        if self.store.mailbox:
            self.store.set_heat(self.runtime.heat())

    def save_heat(self) -> None:
        if self.heat is None:
            return
        try:
            save_heat(*self.heat, self.runtime.heat())
        except OSError as e:
            logger.warning("moet: heat file %s cannot be written (%s); the next start will be cold", self.heat[0], e.strerror)
            self.heat = None

    def stop(self) -> None:
        """Ends the thread and, if it ever ran, writes counters and heat a last time."""
        self.ending.set()
        if self.thread is None:
            return
        self.thread.join()
        self.thread = None
        try:
            self.count()
            self.save_heat()
        except (OSError, RuntimeError, MoetError) as e:
            logger.warning("moet: the last counters and heat were not saved: %s", e)


def write(path: Path, values: dict[str, Any]) -> None:
    """Appears whole. Nothing if the run's folder is gone already."""
    partial = path.with_name(path.name + ".tmp")
    try:
        partial.write_text(json.dumps(values))
        partial.replace(path)
    except FileNotFoundError:
        pass
