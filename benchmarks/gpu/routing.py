"""Seeded routing with a stated locality: which experts a token takes, layer by layer, and how local the result is.

An expert's score is the bias of its popularity rank plus a normal noise that is correlated from token to token; the TOP_K best are taken. A linear gate on a
normalised hidden state has the same form (noise = gate row times state), so the fixed trace and the real router share `bias`.
"""

from concurrent.futures import ThreadPoolExecutor

import numpy as np

EXPONENT = 0.87
"""Of the bias, -EXPONENT * ln(1 + rank): 19 % of the experts then serve 96 % of the routings."""
MEMORY = 0.8
"""Correlation of the noise between successive tokens of a stream."""
HOT_SHARE = 0.19


def bias(layer: int, experts: int, seed: int = 0) -> np.ndarray:
    """float32 [experts]: ranks in an order of the layer's own."""
    ranks = np.random.default_rng([seed, layer]).permutation(experts)
    return (-EXPONENT * np.log1p(ranks)).astype(np.float32)


def correlated(rng: np.random.Generator, steps: int, shape: tuple[int, ...], memory: float = MEMORY) -> np.ndarray:
    """float32 [steps, *shape]: standard normal at every step, correlation `memory` from one to the next."""
    noise = rng.standard_normal((steps, *shape), np.float32)
    fresh = np.float32((1 - memory**2) ** 0.5)
    for step in range(1, steps):
        noise[step] = np.float32(memory) * noise[step - 1] + fresh * noise[step]
    return noise


def trace(steps: int, layers: int, tokens: int, experts: int, top_k: int, seed: int = 0, threads: int = 4) -> np.ndarray:
    """int32 [steps, layers, tokens, top_k]: each of the `tokens` is a stream of its own; a token's experts in no particular order."""

    def layer_trace(layer: int) -> np.ndarray:
        scores = correlated(np.random.default_rng([seed, layer, tokens]), steps, (tokens, experts)) + bias(layer, experts, seed)
        return np.argpartition(-scores, top_k, axis=-1)[..., :top_k].astype(np.int32)

    with ThreadPoolExecutor(threads) as pool:
        return np.stack(list(pool.map(layer_trace, range(layers))), axis=1)


def locality(ids: np.ndarray, experts: int) -> dict[str, float]:
    """Of a trace [steps, layers, tokens, top_k].

    hot_share_serves: part of all routings that go to the HOT_SHARE most routed (layer, expert) rows; repeats: part of a token's experts that the stream's token
    before had too; distinct_per_layer: mean number of distinct experts of a layer's step.
    """
    steps, layers = ids.shape[:2]
    rows = ids + (np.arange(layers, dtype=np.int32) * experts)[:, None, None]
    counts = np.sort(np.bincount(rows.ravel(), minlength=layers * experts))[::-1]
    hot = round(HOT_SHARE * layers * experts)
    repeated = (ids[1:, ..., :, None] == ids[:-1, ..., None, :]).any(-1).mean() if steps > 1 else float("nan")
    flat = np.sort(ids.reshape(steps, layers, -1), axis=-1)
    distinct = 1 + (np.diff(flat, axis=-1) != 0).sum(-1)
    return {
        "hot_share": HOT_SHARE, "hot_share_serves": float(counts[:hot].sum() / counts.sum()),
        "repeats": float(repeated), "distinct_per_layer": float(distinct.mean()),
    }  # fmt: skip
