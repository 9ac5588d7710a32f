"""Experts as float32 matrices on a device, and what they compute."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch

from moet.checkpoint import Checkpoint, ExpertWeights, Matrix, dequantize
from moet.errors import QuantizeError
from moet.forward.decode import decode
from moet.models import Activation


@dataclass(frozen=True)
class Values:
    """Some experts of a layer.

    first, second    float32 [G, 2 * inter, hidden], gate's rows, then up's; [G, hidden, inter]
    bias, out_bias   float32 [G, 2 * inter], [G, hidden], or None
    """

    first: torch.Tensor
    second: torch.Tensor
    bias: torch.Tensor | None = None
    out_bias: torch.Tensor | None = None


def native_values(
    checkpoint: Checkpoint, layer: int, experts: range, device: torch.device, pool: ThreadPoolExecutor
) -> Values:
    """The checkpoint's values, each rounded to float32 at most once a factor. Raises QuantizeError that names the first
    one that is not finite."""

    # On a CPU numpy is the faster one, an expert a thread; a GPU decodes by itself and is sent the codes.
    found: Callable[[Matrix], torch.Tensor] = (
        (lambda m: torch.from_numpy(dequantize(m, np.float32)))
        if device.type == "cpu"
        else (lambda m: decode(m, device))
    )

    def one(weights: ExpertWeights) -> tuple[torch.Tensor, ...]:
        gate, up, down = weights.gate, weights.up, weights.down
        parts = [torch.cat([found(gate), found(up)]), found(down)]
        if gate.bias is not None:
            parts += [torch.from_numpy(np.concatenate([gate.bias, up.bias])), torch.from_numpy(down.bias)]
        return tuple(parts)

    def read(expert: int) -> ExpertWeights:
        return checkpoint.expert(layer, expert)

    if device.type == "cpu":
        parts = list(pool.map(lambda expert: one(read(expert)), experts))
    else:
        parts = [one(weights) for weights in pool.map(read, experts)]
    values = Values(*(torch.stack(part).to(device) for part in zip(*parts, strict=True)))
    _refuse_infinite(values, layer, experts)
    return values


def _refuse_infinite(values: Values, layer: int, experts: range) -> None:
    for matrices in (values.first, values.second):
        finite = torch.isfinite(matrices)
        if finite.all():
            continue
        g, row, column = (~finite).nonzero()[0].tolist()
        found, inter = float(matrices[g, row, column]), values.second.shape[2]
        name = "down" if matrices is values.second else "gate" if row < inter else "up"
        raise QuantizeError(
            f"layer {layer}, expert {experts[g]}, {name}, row {row % inter if name == 'up' else row}, column {column}: "
            f"expected a value that is finite in float32, found {found}; the checkpoint is damaged, download it again or "
            "compare it with its source"
        )


def activated(both: torch.Tensor, activation: Activation) -> torch.Tensor:
    """`moet.models.Activation` of [n, 2 * inter], gate's half first: [n, inter]."""
    gate, up = both.chunk(2, dim=-1)
    if activation.limit is not None:
        gate, up = gate.clamp(max=activation.limit), up.clamp(-activation.limit, activation.limit)
    if activation.kind == "swiglu_oai":
        return (up + 1) * gate * torch.sigmoid(activation.alpha * gate)
    return torch.nn.functional.silu(gate) * up


def inner(values: Values, g: int, inputs: torch.Tensor, activation: Activation) -> torch.Tensor:
    """float32 [n, inter]: what the second matrix of expert `g` is given for `inputs` [n, hidden]."""
    both = inputs @ values.first[g].T
    return activated(both if values.bias is None else both + values.bias[g], activation)


def outer(values: Values, g: int, hidden: torch.Tensor) -> torch.Tensor:
    """float32 [n, hidden]: the answer of expert `g`, without the router's weight."""
    out = hidden @ values.second[g].T
    return out if values.out_bias is None else out + values.out_bias[g]
