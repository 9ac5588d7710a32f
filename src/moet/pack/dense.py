"""Every tensor that is not a routed expert, byte for byte: one dense file per source shard that holds any,
copied in pieces."""

import json
import os
from collections.abc import Iterator

from blake3 import blake3

from moet.checkpoint import Checkpoint, TensorInfo
from moet.errors import CheckpointError
from moet.pack.durable import TempFile
from moet.pack.fingerprint import TensorDigest
from moet.pack.journal import DenseFile
from moet.pack.manifest import FileDigest

PIECE = 4 << 20


def file_name(number: int, count: int) -> str:
    return f"dense-{number:05d}-of-{count:05d}.safetensors"


def copy(checkpoint: Checkpoint, shard: str, name: str, out: TempFile) -> DenseFile:
    """Writes the dense tensors of `shard` to `out` in the shard's order. Never more than 4 MiB of them in
    memory. Raises CheckpointError if the shard is cut."""
    infos = [checkpoint.tensor_info(tensor) for tensor in checkpoint.dense_names(shard)]
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for info in infos:
        entries[info.name] = {
            "dtype": info.dtype,
            "shape": list(info.shape),
            "data_offsets": [end, end + info.nbytes],
        }
        end += info.nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    head = len(text).to_bytes(8, "little") + text
    whole = blake3(head)
    out.write(head, 0)
    position = len(head)
    digests = []
    piece = bytearray(min(PIECE, max((i.nbytes for i in infos), default=1) or 1))
    for info in infos:
        one = blake3()
        for part in _pieces(info, piece):
            one.update(part)
            whole.update(part)
            out.write(part, position)
            position += part.nbytes
        digests.append(TensorDigest(info.name, info.dtype, tuple(info.shape), one.hexdigest()))
    return DenseFile(name, FileDigest(position, whole.hexdigest()), tuple(digests))


def _pieces(info: TensorInfo, buffer: bytearray) -> Iterator[memoryview]:
    """The tensor's bytes, one bufferful at a time; each view is valid until the next."""
    done = 0
    try:
        with open(info.file, "rb", buffering=0) as file:
            while done < info.nbytes:
                view = memoryview(buffer)[: min(len(buffer), info.nbytes - done)]
                got = os.preadv(file.fileno(), [view], info.offset + done)
                if not got:
                    raise CheckpointError(
                        f"{info.file}, tensor {info.name}: expected {info.nbytes} bytes, found {done}; "
                        "the file is cut, fetch it again"
                    )
                done += got
                yield view[:got]
    except OSError as e:
        raise CheckpointError(f"{info.file}, tensor {info.name}: reading failed: {e.strerror}") from e
