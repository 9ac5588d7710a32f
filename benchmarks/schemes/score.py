"""A quantized model against the native one: the whole vocabulary, token by token."""

from dataclasses import dataclass
from typing import Any

import torch
from apply import Quantized

from moet.eval.measure import Sums, bits_per_byte, compare, perplexity
from moet.forward import Decoder, States


@dataclass(frozen=True)
class Text:
    """ids: int64 [windows, length]. sizes: UTF-8 bytes of each window's tokens, the first one apart, which nothing predicts."""

    ids: torch.Tensor
    sizes: list[int]

    @classmethod
    def of(cls, tokenizer: Any, ids: torch.Tensor) -> "Text":
        return cls(ids, [len(tokenizer.decode(row[1:], skip_special_tokens=True).encode()) for row in ids.tolist()])


@torch.no_grad()
def last_states(decoder: Decoder, ids: torch.Tensor, quantized: Quantized | None, device: torch.device) -> States:
    """What the head is given."""
    states = decoder.embed(ids).to(device)
    for index in range(decoder.layers):
        with decoder.layer(index) as module:
            if quantized and index in quantized.experts:
                values = quantized.experts[index]
                for expert, (both, down) in enumerate(zip(values.first, values.second, strict=True)):
                    decoder.set_experts(module, expert, *both.chunk(2), down)
            states = decoder.run(module, states, index)
    return states


@torch.no_grad()
def score(decoder: Decoder, reference: States, candidate: States, text: Text) -> dict[str, Any]:
    """Of all tokens but each window's first; one entry a window under `windows`, for intervals."""
    sums = []
    with decoder.head():
        for i, size in enumerate(text.sizes):
            one = slice(i, i + 1)
            p, q = (decoder.head_of(s.part(one))[0, :-1] for s in (reference, candidate))
            sums.append(Sums.of(compare(p, q, text.ids[i, 1:]), size))
    return summary(sums)


def summary(sums: list[Sums]) -> dict[str, Any]:
    tokens, size = sum(s.tokens for s in sums), sum(s.bytes for s in sums)
    nats = {name: sum(getattr(s, f"{name}_nll") for s in sums) for name in ("ref", "cand")}
    return {
        "tokens": tokens,
        "kl": round(sum(s.kl for s in sums) / tokens, 6),
        "top1": round(sum(s.agree for s in sums) / tokens, 5),
        "bits_per_byte": round(bits_per_byte(nats["cand"], size), 5),
        "native_bits_per_byte": round(bits_per_byte(nats["ref"], size), 5),
        "perplexity": round(perplexity(nats["cand"], tokens), 4),
        "native_perplexity": round(perplexity(nats["ref"], tokens), 4),
        "windows": [[round(s.kl / s.tokens, 5), round(s.agree / s.tokens, 4)] for s in sums],
    }


