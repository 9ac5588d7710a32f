"""What a pack was made from, by content only: the same for any copy, re-sharding or renaming of the
checkpoint folder, and for no other one.

names        blake3 of config.json (less the keys of CONFIG_NOISE) and of all tensor names: known before any
             tensor is read
expert       blake3 of an expert's matrices: format, shape, scale dtype, multiplier, codes, scales, bias
layer        blake3 of the expert digests in order
fingerprint  blake3 of names, of every layer's digest, and of name, dtype, shape and blake3 of every other
             tensor
"""

import json
import math
from collections.abc import Iterable
from typing import Any

import numpy as np
from blake3 import blake3

from moet.checkpoint.safetensors import DTYPE_BITS
from moet.checkpoint.weights import ExpertWeights, Matrix
from moet.pack.manifest import Struct

CONFIG_NOISE = {"_name_or_path", "transformers_version", "_commit_hash"}


class TensorDigest(Struct):
    name: str
    dtype: str
    shape: tuple[int, ...]
    blake3: str

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BITS[self.dtype] // 8


def names(config: dict[str, Any], tensor_names: Iterable[str]) -> str:
    kept = {key: value for key, value in config.items() if key not in CONFIG_NOISE}
    return _hash([kept, sorted(tensor_names)])


def expert(weights: ExpertWeights) -> str:
    digest = blake3()
    for matrix in (weights.gate, weights.up, weights.down):
        _add(digest, matrix)
    return digest.hexdigest()


def layer(expert_digests: Iterable[str]) -> str:
    digest = blake3()
    for one in expert_digests:
        digest.update(bytes.fromhex(one))
    return digest.hexdigest()


def whole(names_digest: str, layers: Iterable[tuple[int, str]], tensors: Iterable[TensorDigest]) -> str:
    dense = sorted((t.name, t.dtype, list(t.shape), t.blake3) for t in tensors)
    return _hash([names_digest, sorted(layers), dense])


def _add(digest: Any, m: Matrix) -> None:
    multiplier = np.float32(m.multiplier).tobytes().hex()
    head = [m.format, m.rows, m.cols, m.scale_dtype, multiplier, m.bias is not None]
    digest.update(json.dumps(head).encode())
    for part in (m.codes, m.scales, m.bias):
        if part is not None:
            digest.update(memoryview(part).cast("B"))


def _hash(value: Any) -> str:
    return blake3(
        json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()
    ).hexdigest()
