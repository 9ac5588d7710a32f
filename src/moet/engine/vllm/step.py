"""What the running step is: which of its rows are tokens, and whether it is a scan.

Rows that are not tokens (warm-up, profiling, dummy runs, padding) neither page nor heat. A run without attention metadata has no tokens at all; in
others, a row is one if some attention layer writes its KV somewhere (slot -1: nowhere).
"""

from dataclasses import dataclass
from typing import Any

import torch
from vllm.forward_context import get_forward_context


@dataclass(frozen=True)
class Step:
    """rows: indices of the rows that are tokens, None if all are. scan: a request brings more than `scan_tokens` new tokens (a prefill)."""

    rows: torch.Tensor | None
    scan: bool


def current(scan_tokens: int, count: int) -> Step:
    """The step of `count` rows that vLLM is in; found once a step, for all its layers."""
    context = get_forward_context()
    found = context.additional_kwargs.get("moet")
    if found is None or found[0] != count:
        context.additional_kwargs["moet"] = found = (count, describe(context, scan_tokens, count))
    return found[1]


def describe(context: Any, scan_tokens: int, count: int) -> Step:
    metadata = _values(context.attn_metadata)
    if not metadata:
        return Step(torch.empty(0, dtype=torch.long), False)
    longest = max((getattr(m, "max_query_len", None) or count for m in metadata), default=count)
    return Step(_tokens(context, count), longest > scan_tokens)


def _tokens(context: Any, count: int) -> torch.Tensor | None:
    live: torch.Tensor | None = None
    for slots in {s.data_ptr(): s for s in _values(context.slot_mapping) if len(s) >= count}.values():
        here = slots[:count] >= 0
        live = here if live is None else live | here
    if context.is_padding is not None and len(context.is_padding) >= count:
        tokens = ~context.is_padding[:count]
        live = tokens if live is None else live & tokens
    if live is None or bool(live.all()):
        return None
    return live.nonzero().flatten()


def _values(by_layer: Any) -> list[Any]:
    if by_layer is None:
        return []
    parts = by_layer if isinstance(by_layer, list) else [by_layer]  # a list: one dict per micro-batch
    return [v for part in parts for v in (part or {}).values() if v is not None]
