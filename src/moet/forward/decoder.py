"""transformers' own decoder layers, filled from a checkpoint, one layer at a time."""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
import transformers
from torch import nn

from moet.checkpoint import Checkpoint
from moet.errors import CheckpointError
from moet.forward.dense import DenseTensors
from moet.forward.experts import FusedExperts
from moet.forward.mtp import mixed, mtp_prefix, with_one_more_layer
from moet.forward.states import States, joined
from moet.forward.weights import Loader, put

ALIASES = {"KimiK25ForConditionalGeneration": "Kimi_K25ForConditionalGeneration"}
"""Architectures whose class in transformers has another name."""
TOKENS = 4096
"""Tokens of a micro-batch."""


class _Reached(BaseException):
    """Carries a layer's output out of the model's forward. Nothing in a model may catch it, so no Exception."""

    def __init__(self, output: Any) -> None:
        self.output = output


class Decoder:
    """A causal language model of which at most one layer has weights.

    Every step runs the model's own `forward` over layers that are stubs, except the one that is asked for: so
    masks, rotary embeddings, and whatever a layer hands to the next one are the model's own. transformers' models have
    no MTP layer; one of DeepSeek-V3's kind is run as one layer more.
    """

    @classmethod
    def open(
        cls, checkpoint: Checkpoint, *, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
    ) -> "Decoder":
        """Builds the model on the meta device. Raises CheckpointError if transformers does not have it."""
        return cls(checkpoint, torch.device(device), dtype)

    def __init__(self, checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype) -> None:
        self.checkpoint, self.device, self.dtype = checkpoint, device, dtype
        self.model = build(checkpoint, dtype)
        self._mtp = mtp_prefix(checkpoint)
        self._decoder = self.model.get_decoder()
        path = next(name for name, m in self.model.named_modules() if m is self._decoder)
        self._path = path
        self._layers: nn.ModuleList = self._decoder.layers
        self._dense = DenseTensors(checkpoint, checkpoint.dense)
        self._loader = Loader(self.model, self._dense)
        _materialise_buffers(self.model, self._decoder, device)
        self._embedding = self.model.get_input_embeddings()
        self._start: tuple[int, States] | None = None
        for index, layer in enumerate(self._layers):
            layer.forward = functools.partial(self._stub, index)

    @property
    def layers(self) -> int:
        """Number of layers, MTP layers apart."""
        return self.checkpoint.spec.num_layers

    @property
    def mtp(self) -> int | None:
        """Index of the MTP layer, if there is one that can be run: `layer` and `run` take it too, after `mtp_input`."""
        return None if self._mtp is None else self._mtp[0]

    def layer_path(self, index: int) -> str:
        return f"{self._path}.layers.{index}"

    def shards(self, index: int) -> set[str]:
        """Shards with dense tensors that are read for a layer; -1: for `embed`."""
        paths = [self._name_of(self._embedding) if index < 0 else self.layer_path(index)]
        if index == self.mtp:
            paths += [self._name_of(self._embedding), self._name_of(self._decoder.norm)]
        return {self.checkpoint.shard_of(name) for path in paths for name in self._loader.stored(path)}

    def embed(self, ids: torch.Tensor) -> States:
        """What the first layer takes. ids: int64 [B, T], all sequences of one length, no padding."""
        ids = ids.cpu()
        with self._loader.filled([self._name_of(self._embedding)], self.device):
            parts = [
                self._forward(States(i, i), -1).to("cpu") for i in ids.split(max(1, TOKENS // ids.shape[1]))
            ]
        return joined(parts)

    def mtp_input(self, states: States) -> States:
        """What the MTP layer takes, from the states after the last layer: a token shorter, as a window's last token has no
        next one."""
        if self._mtp is None:
            raise CheckpointError(
                f"{self.checkpoint.root}: expected an MTP layer of DeepSeek-V3's kind, found none"
            )
        norm, where = self._decoder.norm, states.hidden.device
        paths = [self._name_of(self._embedding), self._name_of(norm)]
        parts = []
        with torch.no_grad(), self._loader.filled(paths, self.device):
            for part in self.batches(states):
                moved = part.to(self.device)
                ids, hidden = moved.ids[:, 1:], norm(moved.hidden[:, :-1])
                eps = self._decoder.config.rms_norm_eps
                hidden = mixed(self._dense, self._mtp[1], self._embedding(ids), hidden, eps)
                # What the last layer handed on is about the main model's tokens; the MTP layer has its own.
                parts.append(States(ids, hidden, moved.carry and (None,) * len(moved.carry)).to(where))
        return joined(parts)

    @contextlib.contextmanager
    def layer(self, index: int, *, experts: bool = True) -> Iterator[nn.Module]:
        """The layer with its weights, freed on exit. Routed experts have the checkpoint's exact values, rounded
        to `dtype`; experts=False leaves them on the meta device."""
        module = self._layers[index]
        sparse = any(layer.index == index for layer in self.checkpoint.spec.layers)
        fused = FusedExperts.of(module) if sparse else None
        path = self.layer_path(index)
        with (
            self._loader.filled([path], self.device, fused and fused.module, more=index == self.mtp),
            contextlib.ExitStack() as undo,
        ):
            if fused and experts:
                for name, value in fused.empty(self.device).items():
                    put(self.model, f"{self._name_of(fused.module)}.{name}", value, self.device, undo)
                with torch.no_grad():
                    for weights in self.checkpoint.experts(index):
                        fused.set_native(weights)
            yield module

    def set_experts(
        self,
        module: nn.Module,
        expert: int,
        gate: torch.Tensor,
        up: torch.Tensor,
        down: torch.Tensor,
    ) -> None:
        """Overwrites one routed expert of a loaded layer: float [inter, hidden], [inter, hidden],
        [hidden, inter]."""
        with torch.no_grad():
            FusedExperts.of(module).set(expert, gate, up, down)

    def run(self, module: nn.Module, states: States, index: int) -> States:
        """All sequences through layer `index`, which is loaded; the result is where `states` is."""
        if module is not self._layers[index]:
            raise CheckpointError(f"Decoder.run: expected the module of layer {index}, found another one")
        where = states.hidden.device
        return joined([self.step(part, index).to(where) for part in self.batches(states)])

    def step(self, part: States, index: int) -> States:
        """`run` for a few sequences, of `batches`; the result is on the decoder's device."""
        return self._forward(part.to(self.device), index)

    def batches(self, states: States) -> Iterator[States]:
        """Parts of about TOKENS tokens, in order; the same ones every time."""
        count, length = states.ids.shape
        step = max(1, TOKENS // length)
        return (states.part(slice(start, start + step)) for start in range(0, count, step))

    def logits(self, states: States) -> torch.Tensor:
        """float32 [B, T, vocab] of the states after the last layer, on their device."""
        where = states.hidden.device
        with self.head():
            return torch.cat([self.head_of(part).to(where) for part in self.batches(states)])

    @contextlib.contextmanager
    def head(self) -> Iterator[None]:
        """The final norm and the head have their weights, for any number of calls to `head_of`."""
        rest = [
            name
            for name, child in self._decoder.named_children()
            if child not in (self._layers, self._embedding)
        ]
        paths = [
            f"{self._path}.{name}"
            for name in rest
            if any(True for _ in getattr(self._decoder, name).parameters())
        ]
        head = self.model.get_output_embeddings()
        name = self._name_of(head)
        with contextlib.ExitStack() as undo:
            if self._loader.stored(name):
                paths.append(name)
            else:  # tied: the checkpoint has the embedding alone
                embedding = self._name_of(self._embedding)
                undo.enter_context(self._loader.filled([embedding], self.device))
                put(self.model, f"{name}.weight", self._embedding.weight.data, self.device, undo)
            undo.enter_context(self._loader.filled(paths, self.device))
            yield

    def head_of(self, states: States) -> torch.Tensor:
        """float32 [B, T, vocab] of a few sequences, on the decoder's device, while `head` is held."""
        return self._forward(states.to(self.device), len(self._layers)).hidden.float()

    def _forward(self, states: States, index: int) -> States:
        """The model's own forward up to and including layer `index`; -1: up to the first layer's input,
        len(layers): to the logits. Layers before it return what the states are."""
        states = States(states.ids.to(self.device), states.hidden, states.carry)
        self._start = (index, states)
        if index >= 0:
            self._embedding.forward = self._no_embedding
        try:
            with torch.no_grad():
                output = self.model(input_ids=states.ids, use_cache=False).logits
        except _Reached as reached:
            output = reached.output
        finally:
            self._start = None
            self._embedding.__dict__.pop("forward", None)
        return states.followed_by(output)

    def _no_embedding(self, ids: torch.Tensor) -> torch.Tensor:
        """Zeros of the shape that is wanted, without memory."""
        return torch.zeros((), dtype=self.dtype, device=self.device).expand(
            *ids.shape, self.checkpoint.spec.hidden
        )

    def _stub(self, index: int, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Stands in for the `forward` of layer `index`."""
        if self._start is None:
            raise CheckpointError(
                f"layer {index}: expected to be run through Decoder.run, found a direct call"
            )
        target, states = self._start
        if target < 0:
            raise _Reached(hidden)
        if index < target:
            return states.output
        layer = self._layers[index]
        raise _Reached(type(layer).forward(layer, states.hidden, *args, **kwargs))

    def _name_of(self, module: nn.Module) -> str:
        return next(name for name, m in self.model.named_modules() if m is module)


def build(checkpoint: Checkpoint, dtype: torch.dtype = torch.float32) -> nn.Module:
    """The model without weights, on the meta device. Raises CheckpointError if transformers does not have it."""
    name = checkpoint.spec.architecture
    model_class = getattr(transformers, ALIASES.get(name, name), None)
    if model_class is None:
        raise CheckpointError(
            f"{checkpoint.root}, architectures: expected a model that transformers {transformers.__version__} "
            f"has, found {name}"
        )
    config = {key: value for key, value in checkpoint.config.items() if key != "quantization_config"}
    if isinstance(config.get("text_config"), dict):
        config["text_config"] = {k: v for k, v in config["text_config"].items() if k != "quantization_config"}
    if mtp_prefix(checkpoint):
        if isinstance(config.get("text_config"), dict):
            config["text_config"] = with_one_more_layer(config["text_config"])
        else:
            config = with_one_more_layer(config)
    config = model_class.config_class.from_dict(config)
    with torch.device("meta"):
        model = model_class._from_config(config, dtype=dtype)
    return model.eval()


def _materialise_buffers(model: nn.Module, decoder: nn.Module, device: torch.device) -> None:
    """Buffers that no checkpoint holds (rotary frequencies) get the values that the model starts them with."""
    for module in decoder.modules():
        names = module._non_persistent_buffers_set & module._buffers.keys()
        for name in names:
            module._buffers[name] = torch.empty_like(module._buffers[name], device=device)
        if names:
            with torch.no_grad():
                model._init_weights(module)
