"""Load format "moet": vLLM's default loader without the routed experts' tensors, which are not even read."""

import copy
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from moet.checkpoint import Checkpoint


class MoetModelLoader(DefaultModelLoader):
    """Every parameter of the model must be filled by some tensor (vLLM checks that by default only where nothing is quantized). Not a drafter's:
    MTP layers without an embedding and a head of their own get the model's after loading."""

    def __init__(self, load_config: Any) -> None:
        stock = copy.copy(load_config)
        stock.load_format = "safetensors"
        super().__init__(stock)

    def load_weights(self, model: torch.nn.Module, model_config: Any) -> None:
        if "enable_weights_track" not in self.load_config.model_loader_extra_config:
            self.enable_weights_track = model_config.runner_type != "draft"
        super().load_weights(model, model_config)

    def _get_weights_iterator(self, source: DefaultModelLoader.Source) -> Generator[tuple[str, torch.Tensor], None, None]:
        folder, files, _, _ = self._prepare_weights(
            source.model_or_path, source.subfolder, source.revision, source.fall_back_to_pt, source.allow_patterns_overrides
        )
        if self.counter_before_loading_weights == 0.0:
            self.counter_before_loading_weights = time.perf_counter()
        checkpoint = Checkpoint.open(Path(folder)) if not (Path(folder) / "moet.json").exists() else None
        for file in sorted(files):
            with safe_open(file, framework="pt") as tensors:
                names = tensors.keys() if checkpoint is None else checkpoint.dense_names(Path(file).name)
                for name in names:
                    yield source.prefix + name, tensors.get_tensor(name)


def register() -> None:
    register_model_loader("moet")(MoetModelLoader)
