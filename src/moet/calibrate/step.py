"""From the states before a layer to those after it, in both networks."""

from collections.abc import Callable

import torch

from moet.calibrate.layer import LayerWork
from moet.calibrate.routing import adds, answered, record
from moet.calibrate.stored import Streams
from moet.forward import Decoder, States
from moet.models import MoeLayer


def open_layer(decoder: Decoder, layer: MoeLayer, streams: Streams) -> tuple[LayerWork, Callable[[], Streams]]:
    """The work on the layer's experts, and what gives the states after it once that is done.

    Where the layer adds its experts' answer to the rest (all but those with a norm after them, or several residual
    streams), the rest is run once, and what it lacks in the quantized network becomes the experts' to make up for.
    """
    index = layer.index
    with decoder.layer(index, experts=False) as module:
        full, rest = record(decoder, module, streams.full, index, layer.experts)
        quantized, quantized_rest = full, rest
        adding = adds(decoder, module, streams.full, index)
        if not streams.same:
            quantized, quantized_rest = record(decoder, module, streams.quantized, index, layer.experts)
    missing = None
    if adding and not streams.same:
        difference = rest.hidden.float() - quantized_rest.hidden.float()
        missing = difference.flatten(0, 1).to(full.inputs.device)
    checkpoint = decoder.checkpoint
    work = LayerWork(checkpoint, layer, checkpoint.spec.activation, full, quantized, missing)

    def finish() -> Streams:
        answers = (work.full_answer, work.quantized_answer)
        if adding:
            return Streams(index + 1, *map(_plus, (rest, quantized_rest), answers))
        with decoder.layer(index, experts=False) as module:
            before = (streams.full, streams.quantized)
            after = (answered(decoder, module, s, index, a) for s, a in zip(before, answers, strict=True))
            return Streams(index + 1, *after)

    return work, finish


def _plus(rest: States, answer: torch.Tensor) -> States:
    hidden = rest.hidden + answer.view(rest.hidden.shape).to(rest.hidden)
    return States(rest.ids, hidden, rest.carry)
