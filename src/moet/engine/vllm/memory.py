"""How one GPU's memory is divided between the KV cache and expert slots: arithmetic only."""

from dataclasses import dataclass

from moet.errors import EngineError

GIB = 1 << 30


@dataclass(frozen=True)
class Split:
    """Bytes for the KV cache, and for expert slots."""

    kv: int
    slots: int


@dataclass(frozen=True)
class Needs:
    """rows: bytes of a slot for every row. least: the fewest that work. kv_all: KV cache of max_num_seqs requests of max_model_len; kv_one: of one of them."""

    rows: int
    least: int
    kv_all: int
    kv_one: int


def split(free: int, needs: Needs, explicit: int | None) -> Split:
    """`free` bytes are left for both. explicit: what the slots shall take; None: the KV cache gets what its requests can need, at most half of `free` but
    always one request, and the slots the rest. What rows do not need is the KV cache's.

    Raises EngineError if the slots that are asked for, or the least that work, do not fit beside the KV cache of one request.
    """
    if explicit is not None:
        slots = max(min(explicit, needs.rows), 0)
        if slots < needs.least:
            raise EngineError(
                f"moet.gpu_gib: expected at least {gib(needs.least, up=True)} GiB, which is the fewest slots that work, found {gib(slots)}; raise it, or lower max_num_seqs"
            )
    else:
        kv = max(min(needs.kv_all, free // 2), needs.kv_one)
        slots = min(needs.rows, max(free - kv, needs.least))
    if free - slots < needs.kv_one:
        raise EngineError(
            f"GPU memory: {gib(free)} GiB are left for expert slots and the KV cache; expected room for {gib(slots)} GiB of slots and {gib(needs.kv_one)} GiB, "
            f"one request's KV cache. {'Lower moet.gpu_gib or gpu_percent' if explicit is not None else 'Lower --max-model-len'}, or raise --gpu-memory-utilization"
        )
    return Split(free - slots, slots)


def gib(size: int, up: bool = False) -> str:
    """Hundredths of a GiB. up: that many are enough, whoever sets them."""
    return f"{-(-100 * size // GIB) / 100 if up else size / GIB:.2f}"
