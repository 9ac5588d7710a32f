"""Tensors of a checkpoint into modules that stand on the meta device, and out again."""

import contextlib
from collections.abc import Iterator
from copy import deepcopy

import torch
from torch import nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from moet.errors import CheckpointError
from moet.forward.dense import DenseTensors


class Loader:
    """Fills parts of a model from dense tensors, through transformers' own table of renamings and
    conversions."""

    def __init__(self, model: nn.Module, dense: DenseTensors) -> None:
        self.model, self.dense = model, dense
        mapping = get_model_conversion_mapping(model)
        self._renamings = [x for x in mapping if isinstance(x, WeightRenaming)]
        self._converters = [x for x in mapping if isinstance(x, WeightConverter)]
        self._meta = model.state_dict()
        self._targets = {name: self._target(name) for name in dense.names}

    def _target(self, name: str) -> tuple[str, str | None]:
        """(name in the model, the converter's source pattern or None)."""
        prefix = self.model.base_model_prefix
        target = rename_source_key(name, self._renamings, self._converters, prefix, self._meta)
        if target[0] not in self._meta and name in self._meta:
            target = rename_source_key(name, [], [], prefix, self._meta)
        return target

    def stored(self, path: str) -> set[str]:
        """Checkpoint tensors that the module `path` is filled from."""
        return {x for name in self._sources(path) for x in self.dense.stored(name)}

    def _sources(self, path: str) -> list[str]:
        return [name for name, (target, _) in self._targets.items() if target.startswith(f"{path}.")]

    @contextlib.contextmanager
    def filled(
        self,
        paths: list[str],
        device: torch.device,
        without: nn.Module | None = None,
        more: bool = False,
    ) -> Iterator[None]:
        """The modules at `paths` have their weights on `device`; afterwards they are on the meta device again.
        `without`: a module whose parameters are left as they are. `more`: the checkpoint may have tensors there that
        the model has not.

        Raises CheckpointError if a parameter is not filled, or has another shape than the checkpoint's tensor.
        """
        names = [name for path in paths for name in self._sources(path)]
        if more:
            names = [name for name in names if self._targets[name][0] in self._meta]
        with contextlib.ExitStack() as undo:
            for target, value in self._converted(names):
                put(self.model, target, value, device, undo)
            left = set(without.modules()) if without is not None else set()
            for path in paths:
                self._refuse_gaps(path, left)
            yield

    def _converted(self, names: list[str]) -> Iterator[tuple[str, torch.Tensor]]:
        waiting: dict[str, WeightConverter] = {}
        for name in names:
            target, pattern = self._targets[name]
            if pattern is None:
                yield target, self.dense.read(name)
                continue
            if target not in waiting:
                waiting[target] = deepcopy(next(c for c in self._converters if pattern in c.source_patterns))
            waiting[target].add_tensor(target, name, pattern, self.dense.read(name))
        for target, converter in waiting.items():
            made = converter.convert(target, model=self.model, config=self.model.config)
            for name, value in made.items():
                yield name, value[0] if isinstance(value, list) else value

    def _refuse_gaps(self, path: str, left: set[nn.Module]) -> None:
        for where, module in self.model.get_submodule(path).named_modules():
            if module in left:
                continue
            persistent = {
                k: b for k, b in module._buffers.items() if k not in module._non_persistent_buffers_set
            }
            for leaf, value in {**module._parameters, **persistent}.items():
                if value is not None and value.is_meta:
                    name = ".".join(filter(None, (path, where, leaf)))
                    raise CheckpointError(
                        f"{self.dense.checkpoint.root}: expected a tensor for {name}, which "
                        f"{type(self.model).__name__} has, found none"
                    )


def put(
    model: nn.Module, name: str, value: torch.Tensor, device: torch.device, undo: contextlib.ExitStack
) -> torch.Tensor:
    """Sets a parameter or buffer, in the dtype it has; `undo` sets it back. Returns what was set.
    Raises CheckpointError if the model has no such tensor, or has another shape."""
    path, _, leaf = name.rpartition(".")
    try:
        module = model.get_submodule(path)
    except AttributeError:
        raise CheckpointError(
            f"{name}: expected {type(model).__name__} to have it, as the checkpoint does, found no such part of the model"
        ) from None
    table = module._parameters if leaf in module._parameters else module._buffers
    old = table.get(leaf)
    if old is None or old.shape != value.shape:
        found = "none" if old is None else list(old.shape)
        raise CheckpointError(
            f"{name}: expected {list(value.shape)}, as the checkpoint has it, found {found}"
        )
    value = value.to(device=device, dtype=old.dtype)
    table[leaf] = nn.Parameter(value, requires_grad=False) if table is module._parameters else value
    undo.callback(table.__setitem__, leaf, old)
    return value
