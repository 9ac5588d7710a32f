"""Shards that are not all there yet: a folder that a download still fills, and a Hub repository that is
fetched shard by shard."""

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from moet.checkpoint.safetensors import read_header
from moet.checkpoint.source import LocalSource
from moet.errors import CheckpointError, ConfigError

PARTIAL = (".incomplete", ".part", ".partial", ".aria2", ".crdownload", ".tmp")
"""Ends of the names that downloaders give to unfinished files; huggingface_hub keeps its own in
.cache/huggingface/download."""

MARKERS = (".aria2", ".part", ".partial", ".incomplete", ".crdownload")
"""SHARD + one of these beside a shard: its downloader has not finished it, whatever its size is."""


def shard_state(path: Path) -> str:
    """ "" if the shard is complete (its header is readable and the file has the size that it adds up to),
    else what is wrong with it."""
    for end in MARKERS:
        if (marker := path.with_name(path.name + end)).exists():
            return f"{marker.name} beside it says that it is being written"
    if not path.is_file():
        return "it is not there"
    try:
        read_header(path)
    except CheckpointError as e:
        return str(e)
    return ""


class GrowingSource(LocalSource):
    """A checkpoint folder, complete or still being downloaded.

    patience  seconds without any change in the folder after which a missing shard is an error. A folder in
              which nothing has changed for that long
              is complete as far as it goes, so a finished one with a missing shard fails at once.
    consume   `release` deletes the shard
    waiting   called with a text while a shard is waited for
    """

    POLL = 1.0

    def __init__(
        self,
        root: Path,
        *,
        patience: float = 120.0,
        consume: bool = False,
        waiting: Callable[[str], None] = lambda text: None,
    ) -> None:
        super().__init__(root)
        self.patience, self.consume, self.waiting = patience, consume, waiting
        self._complete: set[str] = set()
        self._started = time.time()
        self.await_file("config.json", lambda path: "" if path.is_file() else "it is not there")
        if not (self.root / "model.safetensors").exists() and (
            self._unfinished() or not list(self.root.glob("*.safetensors"))
        ):
            self.await_file(
                "model.safetensors.index.json",
                lambda path: (
                    "" if path.is_file() or (self.root / "model.safetensors").is_file() else "it is not there"
                ),
            )

    def ready(self, shard: str) -> bool:
        """Whether `fetch` would return at once."""
        if shard not in self._complete and not shard_state(self.root / shard):
            self._complete.add(shard)
        return shard in self._complete

    def fetch(self, shard: str) -> Path:
        """Raises CheckpointError if the shard is missing or cut and nothing in the folder has changed for
        `patience` seconds."""
        path = self.root / shard
        if shard not in self._complete:
            self.await_file(shard, shard_state)
            self._complete.add(shard)
        return path

    def release(self, shard: str) -> None:
        if self.consume:
            self._complete.discard(shard)
            (self.root / shard).unlink(missing_ok=True)

    def await_file(self, name: str, state: Callable[[Path], str]) -> None:
        """Waits until `state` of the file is ""."""
        path = self.root / name
        seen, changed = self._snapshot()
        while problem := state(path):
            idle = time.time() - changed
            if idle >= self.patience:
                unfinished = self._unfinished()
                raise CheckpointError(
                    f"{path}: expected a complete file, but {problem}. "
                    f"Nothing in {self.root} has changed for {idle:.0f} s"
                    + (
                        f" ({len(unfinished)} unfinished downloads there, e.g. {unfinished[0]})"
                        if unfinished
                        else ""
                    )
                    + ". Start the download again (it goes on where it stopped), then pack again"
                )
            self.waiting(f"waiting for {name} ({problem.split('. ')[0]}; {idle:.0f} s without progress)")
            time.sleep(min(self.POLL, max(0.01, self.patience - idle)))
            now, newest = self._snapshot()
            if now != seen:
                seen, changed = now, max(newest, time.time())

    def _folders(self) -> list[Path]:
        return [f for f in (self.root, self.root / ".cache" / "huggingface" / "download") if f.is_dir()]

    def _files(self) -> list[Path]:
        return [p for folder in self._folders() for p in folder.iterdir() if p.is_file()]

    def _unfinished(self) -> list[str]:
        return sorted(p.name for p in self._files() if p.name.endswith(PARTIAL))

    def _snapshot(self) -> tuple[frozenset, float]:
        """(names and sizes, time of the newest change) of the folder and of huggingface_hub's folder of
        unfinished files."""
        entries, newest = [], max(folder.stat().st_mtime for folder in self._folders())
        for path in self._files():
            try:
                stat = path.stat()
            except FileNotFoundError:
                continue
            entries.append((path.name, stat.st_size, stat.st_mtime_ns))
            newest = max(newest, stat.st_mtime)
        return frozenset(entries), min(newest, time.time())


class HubSource:
    """A repository of the Hugging Face Hub. Small files come first, each shard when it is asked for; all
    from one commit.

    store    folder for what is downloaded; None: the Hub's shared cache, where `consume` deletes nothing
    commit   the commit that `revision` named when the run began, or the one of an earlier run that is being
             continued
    Raises CheckpointError with the Hub's own words if the repository or a file cannot be had.
    """

    def __init__(
        self,
        repo: str,
        *,
        revision: str | None = None,
        store: Path | None = None,
        consume: bool = False,
        endpoint: str | None = None,
        waiting: Callable[[str], None] = lambda text: None,
    ) -> None:
        from huggingface_hub import HfApi, hf_hub_download  # takes 0.2 s to import

        if consume and store is None:
            raise ConfigError(
                "consume: expected a folder of its own for the shards; the Hub's shared cache is not deleted from"
            )
        self.repo, self.consume, self.waiting, self._download = repo, consume, waiting, hf_hub_download
        self._ahead: dict[str, Future[Path]] = {}
        self.endpoint, self.store = endpoint, store
        pinned = store / "commit" if store else None
        if pinned and pinned.is_file() and revision is None:
            revision = pinned.read_text().strip()
        info = self._ask(
            f"model {repo}", lambda: HfApi(endpoint=endpoint).model_info(repo, revision=revision)
        )
        self.commit: str = info.sha
        self.names = sorted(s.rfilename for s in info.siblings or [])
        if pinned:
            try:
                store.mkdir(parents=True, exist_ok=True)
                pinned.write_text(self.commit)
            except OSError as e:
                raise CheckpointError(
                    f"{store}: expected a folder to download to, found: {e.strerror}"
                ) from e
        for name in ("config.json", "model.safetensors.index.json"):
            if name in self.names:
                self.root = self._get(name).parent
        if "config.json" not in self.names:
            raise CheckpointError(
                f"{repo} at {self.commit}: expected config.json, found {', '.join(self.names[:5]) or 'no files'}"
            )
        for name in self.names:
            if not name.endswith(
                (".safetensors", ".bin", ".pth", ".pt", ".gguf", ".onnx", ".h5", ".msgpack")
            ) and not name.startswith("."):
                self.waiting(f"downloading {name}")
                self._get(name)

    def fetch(self, shard: str) -> Path:
        if shard not in self.names:
            raise CheckpointError(
                f"{self.repo} at {self.commit}: expected the file {shard}, as the index names it, found none"
            )
        self.waiting(f"downloading {shard}")
        path = self._ahead.pop(shard).result() if shard in self._ahead else self._get(shard)
        if problem := shard_state(path):
            raise CheckpointError(f"{path}: expected a complete shard of {self.repo}, but {problem}")
        return path

    def expect(self, shard: str) -> None:
        """Starts downloading a shard that will be fetched next. One at a time: with `consume` a disk may not hold more."""
        if self._ahead or shard not in self.names or (self.root / shard).is_file():
            return
        future = self._ahead[shard] = Future()

        def download() -> None:
            try:
                future.set_result(self._get(shard))
            except BaseException as e:
                future.set_exception(e)

        # Not a pool: its threads are joined when the interpreter ends, and Ctrl-C would wait for the download.
        threading.Thread(target=download, daemon=True).start()

    def release(self, shard: str) -> None:
        if self.consume:
            (self.root / shard).unlink(missing_ok=True)

    def _get(self, name: str) -> Path:
        place = {"local_dir": self.store / "files"} if self.store else {}
        return Path(
            self._ask(
                f"{self.repo}/{name}",
                lambda: self._download(
                    self.repo,
                    name,
                    revision=self.commit,
                    endpoint=self.endpoint,
                    **place,
                ),
            )
        )

    def _ask(self, what: str, question: Callable[[], Any]) -> Any:
        from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

        try:
            return question()
        except (HfHubHTTPError, LocalEntryNotFoundError, ValueError, OSError) as e:
            raise CheckpointError(
                f"{what}: the Hub did not give it ({type(e).__name__}: {str(e).splitlines()[0]})"
            ) from e


def is_hub_id(text: str) -> bool:
    """ORG/NAME that is no folder here."""
    parts = text.split("/")
    return (
        len(parts) == 2
        and all(p and not p.startswith((".", "~")) for p in parts)
        and not os.path.exists(text)
    )
