"""A Hugging Face checkpoint folder as a stream of native experts, and the names of everything else."""

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from moet.checkpoint.index import read_index, read_json
from moet.checkpoint.layer import LayerReader, plan_layer
from moet.checkpoint.names import LayerNames, Namer, check_complete
from moet.checkpoint.reader import Reader, Span
from moet.checkpoint.safetensors import TensorInfo, read_header
from moet.checkpoint.source import LocalSource, ShardSource
from moet.checkpoint.weights import ExpertWeights
from moet.errors import CheckpointError
from moet.models import ModelSpec, dense_prefixes, family_of, spec_of


class Checkpoint:
    """Opened with `Checkpoint.open`. Methods that need a shard's header or data fetch the shard first. Every
    error is a CheckpointError."""

    spec: ModelSpec
    config: dict[str, Any]
    root: Path
    shards: tuple[str, ...]

    @classmethod
    def open(cls, source: "Path | str | ShardSource") -> "Checkpoint":
        """Reads config.json and the index (or the only file's header), and claims every name; no tensor data
        is read.

        Raises CheckpointError: no checkpoint, an architecture that is not known, a name that nothing claims,
        an expert that lacks a tensor.
        """
        return cls(LocalSource(Path(source)) if isinstance(source, str | Path) else source)

    def __init__(self, source: ShardSource) -> None:
        self.source = source
        self.root = Path(source.root)
        self.config = read_json(self.root / "config.json")
        self._shard_of = read_index(source)
        self._names_of: dict[str, set[str]] = {}
        for name, shard in self._shard_of.items():
            self._names_of.setdefault(shard, set()).add(name)
        self.shards = tuple(sorted(self._names_of))
        self.spec = spec_of(self.config, self._shard_of.keys())
        _, self._family = family_of(self.config)
        namer = Namer(self._family, self.spec, dense_prefixes(self._family, self.config))
        self._dense = {name for name, shard in self._shard_of.items() if not namer.claim(name, shard)}
        self._layers: dict[int, LayerNames] = {names.layer.index: names for names in namer.layers.values()}
        for names in self._layers.values():
            check_complete(names)
            self._check_router(names)
        self._reader = Reader()
        self._headers: dict[str, dict[str, TensorInfo]] = {}
        self._plans: dict[int, LayerReader] = {}

    def _check_router(self, names: LayerNames) -> None:
        prefix = names.layer.prefix
        for pattern in (
            (self._family.mtp_experts,)
            if names.layer.mtp and self._family.mtp_experts
            else self._family.experts
        ):
            tail = pattern[pattern.index("}") + 2 :]
            if prefix.endswith(tail):
                router = prefix[: -len(tail)] + self._family.router
                if router not in self._dense:
                    raise CheckpointError(
                        f"{self.root}: expected the router of layer {names.layer.index}, {router}, found none"
                    )
                return

    @property
    def names(self) -> Collection[str]:
        """Names of all tensors, as the index has them."""
        return self._shard_of.keys()

    @property
    def dense(self) -> Collection[str]:
        """Names of the tensors that are no routed experts; no header is read for it."""
        return self._dense

    @property
    def dense_shards(self) -> tuple[str, ...]:
        """Shards that hold tensors which are no routed experts; no header is read for it."""
        return tuple(sorted({self._shard_of[name] for name in self._dense}))

    def shard_of(self, name: str) -> str:
        """File name of the shard that holds a tensor. Raises CheckpointError if no shard does."""
        if name not in self._shard_of:
            raise CheckpointError(f"{self.root}: expected a tensor {name}, found none in the index")
        return self._shard_of[name]

    def layer_shards(self, layer: int) -> set[str]:
        """Shards that hold parts of a layer's routed experts."""
        return {self._shard_of[name] for name in self._names(layer).names()}

    def dense_names(self, shard: str) -> list[str]:
        """Tensors of a shard that are no routed experts, in file order."""
        return [name for name in self._header(shard) if name in self._dense]

    def tensor_info(self, name: str) -> TensorInfo:
        return self._header(self.shard_of(name))[name]

    def read(self, name: str) -> np.ndarray:
        """All bytes of a tensor, uint8 [nbytes]."""
        info = self.tensor_info(name)
        return self._reader.read([Span(info.file, info.offset, info.nbytes)])[0]

    def native_format(self, layer: int) -> str:
        """ "mxfp4", "nvfp4", "fp8", "fp8_row" or "bf16": what all experts of the layer are stored as."""
        return self._plan(layer).format

    def scale_dtype(self, layer: int) -> str:
        """safetensors' dtype of the layer's scales as stored, "" for bf16."""
        return self._plan(layer).scale_dtype

    def biased(self, layer: int) -> bool:
        """Whether the layer's experts have biases."""
        return self._plan(layer).biased

    def expert_bytes(self, layer: int) -> int:
        """Stored bytes of one expert: codes, scales, biases."""
        return self._plan(layer).expert_bytes

    def expert(self, layer: int, expert: int) -> ExpertWeights:
        """One routed expert, in memory of its own."""
        plan = self._plan(layer)
        if not 0 <= expert < plan.layer.experts:
            raise CheckpointError(
                f"layer {layer}: expected an expert of 0 to {plan.layer.experts - 1}, found {expert}"
            )
        return plan.read(expert, self._reader)

    def experts(self, layer: int) -> Iterator[ExpertWeights]:
        """All experts of a layer, ascending. Only the yielded one is in memory."""
        for expert in range(self._plan(layer).layer.experts):
            yield self.expert(layer, expert)

    def check(self) -> None:
        """Reads every shard's header: all tensors are where the index says, have the right shapes and dtypes,
        and the files are complete."""
        for shard in self.shards:
            self._header(shard)
        for layer in self.spec.layers:
            self._plan(layer.index)

    def release(self, shard: str) -> None:
        """Closes a shard that is used up and tells the source. A later read fetches it again."""
        header = self._headers.get(shard)
        if header:
            self._reader.close(next(iter(header.values())).file)
        self.source.release(shard)

    def close(self) -> None:
        """Closes all files. Reading opens them again."""
        self._reader.close()

    def _names(self, layer: int) -> LayerNames:
        if layer not in self._layers:
            raise CheckpointError(
                f"layer {layer}: expected a layer with routed experts ({_ranges(self._layers)}), found none"
            )
        return self._layers[layer]

    def _plan(self, layer: int) -> LayerReader:
        if layer not in self._plans:
            self._plans[layer] = plan_layer(
                self._names(layer), self._family.projections, self.spec.hidden, self.tensor_info
            )
        return self._plans[layer]

    def _header(self, shard: str) -> dict[str, TensorInfo]:
        if shard not in self._headers:
            path = self.source.fetch(shard)
            header = read_header(path)
            listed = self._names_of[shard]
            for name in header.keys() - listed:
                where = self._shard_of.get(name)
                raise CheckpointError(
                    f"{path}, tensor {name}: expected only tensors that the index assigns to this file, "
                    f"found one that it {f'assigns to {where}' if where else 'does not list'}. "
                    "Index and shards are of different versions."
                )
            for name in listed - header.keys():
                raise CheckpointError(
                    f"{path}: expected tensor {name}, as the index says, found none. "
                    "Index and shards are of different versions."
                )
            self._headers[shard] = header
        return self._headers[shard]


def _ranges(layers: dict[int, LayerNames]) -> str:
    return f"{min(layers)} to {max(layers)}"
