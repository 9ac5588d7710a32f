"""One engine with moet on: what its processes agree on. It is VllmConfig.additional_config, so it reaches them all."""

import hashlib
import json
import os
import shutil
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from moet.config import MoetConfig
from moet.errors import EngineError

SHM = Path("/dev/shm")


def prefix(namespace: int) -> str:
    """Of the names of run folders, before the launcher's process number: that is one of a namespace, and containers may share /dev/shm."""
    return f"moet-{os.getuid()}-{namespace}-"


try:
    PREFIX = prefix(os.stat("/proc/self/ns/pid").st_ino)
except OSError:
    PREFIX = prefix(0)


@dataclass(frozen=True)
class Run:
    """source: the model folder, a pack if `packed`, else a checkpoint. run_dir: counters of all ranks, and the failure words."""

    source: str
    packed: bool
    settings: MoetConfig
    run_dir: str

    def compute_hash(self) -> str:
        """vLLM's key for compiled code. No setting here changes compiled code, so that a restart or another budget finds it again."""
        return hashlib.sha256(b"moet").hexdigest()

    def get(self, key: str, default: Any = None) -> Any:
        """vLLM reads additional_config as a dict in places; moet is alone in it."""
        return default

    def __reduce__(self) -> tuple:
        # A process that receives a run (engine core, worker) is one in which moet is on: it needs the hooks before anything else.
        return restore, (self.source, self.packed, asdict(self.settings), self.run_dir)

    @property
    def counters_dir(self) -> Path:
        return Path(self.run_dir)

    def counters_path(self, rank: int) -> Path:
        return self.counters_dir / f"rank-{rank}.counters"

    def device_counters_path(self, rank: int) -> Path:
        """What the kernels of a GPU counted; only there (moet.engine.vllm.watch)."""
        return self.counters_dir / f"rank-{rank}.device"


def restore(source: str, packed: bool, settings: dict[str, Any], run_dir: str) -> Run:
    from moet.engine.vllm.activate import activate

    activate()
    return Run(source, packed, MoetConfig(**settings), run_dir)


def of(config: Any) -> Run | None:
    """The run of a VllmConfig; None if moet is off there."""
    run = getattr(config, "additional_config", None)
    return run if isinstance(run, Run) else None


_made = 0


def make_run_dir(settings: MoetConfig, launcher: int, device: str = "cpu") -> str:
    """The folder of the next run of process `launcher`. An API server of several, forked or spawned by it, gets the folder of its only run.

    device: for "cuda" it is on tmpfs, because the driver pins no page of a file on a disk. Raises EngineError if moet.run_dir is not, or if no folder can be made.
    """
    global _made
    if device == "cuda" and settings.run_dir and SHM not in Path(settings.run_dir).resolve().parents:
        raise EngineError(f"moet.run_dir {settings.run_dir}: expected a folder under {SHM}, found another; the GPU counts failed rows in a page there, which it can only pin on tmpfs")
    if settings.run_dir:
        named = Path(settings.run_dir)
        make(named)
        if launcher == os.getpid():  # an earlier run's failures are not this one's
            for path in [*named.glob("rank-*"), *named.glob("failures*")]:
                path.unlink(missing_ok=True)
        return settings.run_dir
    base = SHM if device == "cuda" else Path(tempfile.gettempdir())
    remove_stale(base)
    path = base / f"{PREFIX}{launcher}-{_made if launcher == os.getpid() else 0}"
    _made += 1
    if launcher == os.getpid():  # what is there was left by a process that had this number and was killed: in a container that starts again numbers repeat
        shutil.rmtree(path, ignore_errors=True)
    make(path)
    if path.stat().st_uid != os.getuid():
        raise EngineError(f"{path}: expected a folder of this user, found one of user {path.stat().st_uid}; set moet.run_dir")
    return str(path)


def make(path: Path) -> None:
    """Raises EngineError with the reason if it cannot be."""
    try:
        path.mkdir(mode=0o700, parents=path.parent != SHM, exist_ok=True)
    except OSError as e:
        raise EngineError(
            f"{path}: expected a folder that can be made, found: {e.strerror}; it holds the counters and the failure words of a run. A GPU's has to be on a memory file system, {SHM} "
            "(containers: --shm-size); others may be named by moet.run_dir"
        ) from e


def remove_stale(base: Path) -> None:
    """Removes run folders of processes that are gone (killed, so they could not do it)."""
    for path in base.glob(PREFIX + "*"):
        launcher = path.name.removeprefix(PREFIX).split("-")[0]
        if launcher.isdecimal() and not Path(f"/proc/{launcher}").exists():
            shutil.rmtree(path, ignore_errors=True)


def moet_values(additional: Any) -> dict[str, Any] | None:
    """The "moet" part of --additional-config, or None. Raises EngineError if it is not an object, or not alone."""
    if not isinstance(additional, dict) or "moet" not in additional:
        return None
    values, others = additional["moet"], sorted(set(additional) - {"moet"})
    if not isinstance(values, dict):
        raise EngineError(f"--additional-config moet: expected an object of settings, found {json.dumps(values)}")
    if others:
        raise EngineError(f"--additional-config: expected moet alone, found {', '.join(others)} too; vLLM would not see those")
    return values
