"""What the running step is: which of its rows are tokens, and whether it is a scan.

Rows that are not tokens (warm-up, profiling, dummy runs, padding) neither page nor heat. A run without attention metadata has no tokens at all; in
others, a row is one if some attention layer writes its KV somewhere (slot -1: nowhere). A CPU looks for those rows here. On a GPU nothing may wait for the
device, so the kernels look for themselves, in the slots of this step: runner V2 keeps them in one buffer that lives as long as its graphs (BlockTables.slot_mappings),
recomputes it before every step, the drafter's too, and fills it with -1 behind the last token.
"""

from dataclasses import dataclass
from typing import Any

import torch
from vllm.forward_context import get_forward_context

from moet.errors import EngineError


@dataclass(frozen=True)
class Step:
    """rows: indices of the rows that are tokens, None if all are. scan: a request brings more than `scan_tokens` new tokens (a prefill)."""

    rows: torch.Tensor | None
    scan: bool


@dataclass(frozen=True)
class DeviceStep:
    """kv_slots: int64 [rows], on the device, negative for a row that is no token; None: there is no token among them. scan as above."""

    kv_slots: torch.Tensor | None
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


def current_on_device(scan_tokens: int, decode_tokens: int, layers: frozenset[str], count: int, capturing: bool) -> DeviceStep:
    """As `current`, without a look at the device. layers: attention layers whose slots may be used; decode_tokens: rows of the largest decode step."""
    context = get_forward_context()
    found = context.additional_kwargs.get("moet")
    if found is None or found[0] != count:
        step = describe_on_device(context, scan_tokens, decode_tokens, layers, count, capturing)
        context.additional_kwargs["moet"] = found = (count, step)
    return found[1]


def describe_on_device(context: Any, scan_tokens: int, decode_tokens: int, layers: frozenset[str], count: int, capturing: bool) -> DeviceStep:
    """Raises EngineError for rows without slots, and for a graph of more rows than a decode step has."""
    metadata = _values(context.attn_metadata)
    if not metadata:
        return DeviceStep(None, False)
    mapping = context.slot_mapping[0] if isinstance(context.slot_mapping, list) else context.slot_mapping
    slots = next((s for name, s in (mapping or {}).items() if name in layers and len(s) >= count), None)
    if slots is None:
        raise EngineError(f"a step of {count} rows: expected the KV slot of each in vLLM's forward context, found {[len(s) for s in _values(context.slot_mapping)]}")
    if capturing:
        if count > decode_tokens:
            raise EngineError(f"a CUDA graph of {count} rows: expected decode steps only, of at most {decode_tokens}; use cudagraph_mode FULL_DECODE_ONLY or NONE")
        return DeviceStep(slots[:count], False)
    lengths = [m.max_query_len for m in metadata if isinstance(getattr(m, "max_query_len", None), int)]
    return DeviceStep(slots[:count], max(lengths, default=count) > scan_tokens or count > decode_tokens)


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
