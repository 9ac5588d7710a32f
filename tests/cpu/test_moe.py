"""ExpertRuntime: routing, waves, dtypes and errors against a dense float64 mixture."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from layout_cases import random_expert

from moet.errors import ConfigError, StoreError
from moet.kernels import set_isa
from moet.kernels.expert_mlp import reference
from moet.layout import FORMATS, RowGeometry, crc32c, pack_row
from moet.models import Activation
from moet.moe import ExpertRuntime
from moet.store import RowSource

EXPERTS, HIDDEN, INTER = 12, 96, 160
LAYERS = (3, 4)


class Rows:
    """Two layers of row files and the part of a Pack that the runtime reads."""

    def __init__(self, folder: Path, format: str = "sym2", biased: bool = False, activation: Activation = Activation("swiglu", 7.0), inter: int = INTER) -> None:
        self.geometry = RowGeometry(format, HIDDEN, inter, biased)
        self.activation, self.fingerprint = activation, "f" * 64
        self.rows, self.layers = {}, {}
        for layer in LAYERS:
            rows = np.empty((EXPERTS, self.geometry.row_bytes), np.uint8)
            for e in range(EXPERTS):
                expert = random_expert(self.geometry, 100 * layer + e)
                pack_row(self.geometry, expert.gate, expert.up, expert.down, rows[e])
            path = folder / f"rows-{layer}"
            rows.tofile(path)
            source = RowSource(self.geometry, EXPERTS, path)
            self.rows[layer], self.layers[layer] = rows, SimpleNamespace(rows=lambda precision, source=source: source)

    def open(self, **options) -> ExpertRuntime:
        return ExpertRuntime(self, **({"precision": "base", "budget_bytes": 0, "threads": 2, "io_threads": 2} | options))

    def dense(self, layer: int, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, magnitude: bool = False) -> np.ndarray:
        """The same in float64: every expert on every token, then the weights."""
        x = x.float().numpy()
        out = np.zeros(x.shape)
        for e in range(EXPERTS):
            places = ids.numpy() == e
            if places.any():
                share = np.where(places, np.abs(weights.numpy()) if magnitude else weights.numpy(), 0).sum(1, dtype=np.float64)
                out += share[:, None] * reference.expert_mlp(self.geometry, self.rows[layer][e], x, self.activation, magnitude=magnitude)
        return out


def routing(tokens: int, k: int = 4, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, HIDDEN, generator=generator)
    ids = torch.stack([torch.randperm(EXPERTS, generator=generator)[:k] for _ in range(tokens)]).int() if tokens else torch.empty(0, k, dtype=torch.int32)
    return x, torch.rand(tokens, k, generator=generator), ids


def check(rows: Rows, runtime: ExpertRuntime, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, tolerance: float = 5e-7) -> torch.Tensor:
    found = runtime.forward(LAYERS[0], x, weights, ids)
    expected = rows.dense(LAYERS[0], x, weights, ids)
    size = rows.dense(LAYERS[0], x, weights, ids, magnitude=True)
    assert found.shape == x.shape and found.dtype == x.dtype
    error = np.abs(found.double().numpy() - expected) / np.maximum(size, 1e-30)
    assert error.max(initial=0) < tolerance
    return found


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("biased", [False, True])
def test_formats(tmp_path: Path, format: str, biased: bool) -> None:
    rows = Rows(tmp_path, format, biased)
    with rows.open() as runtime:
        check(rows, runtime, *routing(5))


@pytest.mark.parametrize("format", ["sym2", "tcq2"])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_padding_at_every_rank(tmp_path: Path, format: str, world: int) -> None:
    """The last tile's padded rows of gate and up are no zeros, and only the last rank has them. Here their scales are large, and down's codes there are
    not zero, so that they would show."""
    rows = Rows(tmp_path, format, True, Activation("swiglu_oai", 7.0), inter=116)
    g = rows.geometry
    for layer, path in ((layer, rows.layers[layer].rows("base").path) for layer in LAYERS):
        for row in rows.rows[layer]:
            up, down = row[g.w2_offset - g.w13_tile_bytes : g.w2_offset], row[g.extras_offset - g.w2_tile_bytes : g.extras_offset]
            scales = up[: -256].reshape(-1, g.block_bytes)[:, g.block_code_bytes :]
            scales[:, [*range(20, 32), *range(52, 64)]] = 130
            down.reshape(-1, g.block_bytes)[:, 256 : g.block_code_bytes].reshape(-1, 64, 4)[:, :, 1:] = 0xAA
            checksums = row[g.crc_offset : g.crc_offset + 8 * g.tiles].view("<u4")
            checksums[g.tiles - 1], checksums[-1] = crc32c(up), crc32c(down)
            row[-4:].view("<u4")[0] = crc32c(row[g.extras_offset : -4])
        rows.rows[layer].tofile(path)
    x, weights, ids = routing(5)
    parts = []
    for rank in range(world):
        with rows.open(rank=rank, world=world) as runtime:
            parts.append(runtime.forward(LAYERS[0], x, weights, ids).double().numpy())
    error = np.abs(np.sum(parts, axis=0) - rows.dense(LAYERS[0], x, weights, ids)) / rows.dense(LAYERS[0], x, weights, ids, magnitude=True)
    assert error.max() < 5e-7


def test_layers_of_different_formats(tmp_path: Path) -> None:
    """An MTP layer may have other base rows than the layers before it: the same slots, each layer's own kernels."""
    rows = Rows(tmp_path, "tcq2")
    (tmp_path / "other").mkdir()
    other = Rows(tmp_path / "other", "sym2")
    x, weights, ids = routing(9)
    expected = []
    for alone in (rows, other):
        with alone.open() as runtime:
            expected.append(runtime.forward(LAYERS[1], x, weights, ids))
    rows.layers[LAYERS[1]] = other.layers[LAYERS[1]]
    with rows.open(budget_bytes=6 * (rows.geometry.row_bytes + 4096)) as runtime:
        check(rows, runtime, x, weights, ids)
        assert len(runtime.pager.classes()) == 1
        assert torch.equal(runtime.forward(LAYERS[1], x, weights, ids), expected[1])
    assert not torch.equal(expected[0], expected[1])


@pytest.mark.parametrize("tokens", [0, 1, 2, 500])
def test_routings(tmp_path: Path, tokens: int) -> None:
    rows = Rows(tmp_path, "mxfp4", True, Activation("swiglu_oai", 7.0))
    with rows.open() as runtime:
        x, weights, ids = routing(tokens)
        check(rows, runtime, x, weights, ids)
        check(rows, runtime, x, torch.zeros_like(weights), ids)
        same = torch.full_like(ids, 7)              # all to one expert, and that four times a token
        check(rows, runtime, x, weights, same)
        masked = ids.clone()
        masked[::2] = -1                            # whole tokens without an expert
        masked[1::2, 1] = -5
        found = check(rows, runtime, x, weights, masked)
        assert not found[::2].any()


def test_every_budget_batch_chunk_thread_and_isa_gives_the_same_bits(tmp_path: Path) -> None:
    rows = Rows(tmp_path)
    x, weights, ids = routing(150)
    with rows.open() as runtime:
        whole = runtime.forward(3, x, weights, ids)
        other = runtime.forward(4, x, weights, ids)
        assert not torch.equal(whole, other)
        alone = torch.cat([runtime.forward(3, x[t : t + 1], weights[t : t + 1], ids[t : t + 1]) for t in range(20)])
        assert torch.equal(alone, whole[:20])
        set_isa("portable")
        try:
            assert torch.equal(runtime.forward(3, x, weights, ids), whole)
        finally:
            set_isa("auto")
    smallest = 6 * (rows.geometry.row_bytes + 4096)
    for options in ({"budget_bytes": smallest}, {"threads": 1}, {"threads": 5}, {"scratch_bytes": 20000}, {"budget_bytes": smallest, "scratch_bytes": 1}):
        with rows.open(**options) as runtime:
            for scan in (False, True, False):
                assert torch.equal(runtime.forward(3, x, weights, ids, scan), whole), options
                assert torch.equal(runtime.forward(4, x, weights, ids, scan), other), options
            counters = runtime.counters()
            assert counters.waves > 0 if "budget_bytes" in options else counters.waves == 0


def test_bfloat16_is_the_float32_result_rounded_once(tmp_path: Path) -> None:
    rows = Rows(tmp_path)
    x, weights, ids = routing(33)
    x = x.bfloat16()
    with rows.open() as runtime:
        assert torch.equal(runtime.forward(3, x, weights, ids), runtime.forward(3, x.float(), weights, ids).bfloat16())


def test_ranks_add_up(tmp_path: Path) -> None:
    rows = Rows(tmp_path, "mxfp4", True, Activation("swiglu_oai", 7.0))
    x, weights, ids = routing(9)
    expected, size = rows.dense(3, x, weights, ids), rows.dense(3, x, weights, ids, magnitude=True)
    for world in (2, 3):
        total = np.zeros(expected.shape)
        for rank in range(world):
            with rows.open(rank=rank, world=world) as runtime:
                total += runtime.forward(3, x, weights, ids).double().numpy()
        assert np.max(np.abs(total - expected) / size) < 5e-7


def test_combine_is_in_the_order_of_places(tmp_path: Path) -> None:
    """Permuting a token's places changes the order of the sum and nothing else."""
    rows = Rows(tmp_path)
    x, weights, ids = routing(8)
    with rows.open() as runtime:
        singles = [runtime.forward(3, x, torch.ones(8, 1), ids[:, j : j + 1].contiguous()) for j in range(4)]
        for order in ([0, 1, 2, 3], [3, 1, 0, 2]):
            total = torch.zeros_like(x)
            for j in order:
                total += weights[:, j : j + 1] * singles[j]
            assert torch.equal(runtime.forward(3, x, weights[:, order].contiguous(), ids[:, order].contiguous()), total)


def test_heat_is_kept_from_run_to_run(tmp_path: Path) -> None:
    rows = Rows(tmp_path)
    x, weights, ids = routing(1)
    heat_file = tmp_path / "heat" / "model.heat"
    with rows.open(heat_file=heat_file) as runtime:
        runtime.forward(3, x, weights, ids)
    with rows.open(heat_file=heat_file, budget_bytes=6 * (rows.geometry.row_bytes + 4096)) as runtime:
        assert runtime.pager.preheat(wait=True) > 0
        misses = runtime.counters().misses
        runtime.forward(3, x, weights, ids)
        assert runtime.counters().misses == misses


def test_errors_say_what_is_wrong(tmp_path: Path) -> None:
    rows = Rows(tmp_path)
    x, weights, ids = routing(3)
    with rows.open() as runtime:
        with pytest.raises(StoreError, match=r"topk_ids: expected ids below 12.*found 12 for token 1"):
            runtime.forward(3, x, weights, ids.index_fill(0, torch.tensor([1]), 12))
        with pytest.raises(StoreError, match="layer 7"):
            runtime.forward(7, x, weights, ids)
        with pytest.raises(ConfigError, match="x: expected float32 or bfloat16"):
            runtime.forward(3, x.double(), weights, ids)
        with pytest.raises(ConfigError, match="topk_ids: expected contiguous torch.int32"):
            runtime.forward(3, x, weights, ids.long())
        with pytest.raises(ConfigError, match=r"x: expected contiguous torch.float32 \[3, 96\]"):
            runtime.forward(3, torch.zeros(3, 64), weights, ids)
        check(rows, runtime, x, weights, ids)   # an error leaves the runtime as it was
    runtime.close()
    with pytest.raises(ConfigError, match="fp32, int8, int16, int24"):
        rows.open(activations="fp8")


def test_a_damaged_row_is_named_and_gives_no_number(tmp_path: Path) -> None:
    rows = Rows(tmp_path)
    x, weights, ids = routing(3)
    ids[:] = torch.tensor([0, 5, 6, 7])
    with (tmp_path / "rows-3").open("r+b") as f:
        f.seek(5 * rows.geometry.row_bytes + 1000)
        f.write(b"\xff\x00\xff\x00\xff")
    with rows.open() as runtime:
        with pytest.raises(StoreError, match=r"(?s)rows-3.*layer 3.*expert 5"):
            runtime.forward(3, x, weights, ids)
        ids[ids == 5] = 4
        check(rows, runtime, x, weights, ids)
