"""Where shards come from. This is the local folder; sources that are still downloading have the same two
methods."""

from pathlib import Path
from typing import Protocol

from moet.errors import CheckpointError


class ShardSource(Protocol):
    """`root` holds config.json, the index and the tokenizer files from the start; shards may arrive later."""

    root: Path

    def fetch(self, shard: str) -> Path:
        """Path of a shard once it is complete; blocks until then. Raises CheckpointError."""
        ...

    def release(self, shard: str) -> None:
        """No reader needs the shard any more."""
        ...


class LocalSource:
    """A complete checkpoint folder. Raises CheckpointError if it is none."""

    def __init__(self, root: Path) -> None:
        self.root = Path(root)
        if not self.root.is_dir():
            raise CheckpointError(
                f"{self.root}: expected a folder with config.json and safetensors files, found no folder"
            )

    def fetch(self, shard: str) -> Path:
        path = self.root / shard
        if not path.is_file():
            raise CheckpointError(
                f"{path}: expected a file, as the index names it, found none. "
                "Download the checkpoint's missing shards."
            )
        return path

    def release(self, shard: str) -> None:
        """Local shards are kept."""
