"""Which CUDA graphs are captured: whole decode steps, or none.

A captured layer has a fixed number of waves and cannot decide whether it is a scan. Graphs of mixed batches (FULL) hold up to 512 tokens a layer; pieces of
one (PIECEWISE) do too, with the experts inside, as `vllm::moe_forward` is no splitting point. Both would run every prefill through the decoding set's slots.
"""

from typing import Any

ALLOWED = ("NONE", "FULL_DECODE_ONLY")


def set_default(args: Any, full_decode_only: Any) -> bool:
    """Sets EngineArgs' graphs to whole decode steps unless the user chose some, or none (--enforce-eager, -O0). Whether it did."""
    level = getattr(args, "optimization_level", None)
    if args.compilation_config.cudagraph_mode is not None or args.enforce_eager or getattr(level, "value", level) == 0:
        return False
    args.compilation_config.cudagraph_mode = full_decode_only
    return True


def problems(config: Any) -> list[str]:
    mode = config.compilation_config.cudagraph_mode
    name = getattr(mode, "name", str(mode))
    if name in ALLOWED:
        return []
    return [f"cudagraph_mode {name}: batches with prefills would be captured, whose experts stream through other slots than decoding's; use FULL_DECODE_ONLY or NONE"]
