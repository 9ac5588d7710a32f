"""ExpertRuntime from a checkpoint, and the kernels against transformers' own gpt-oss experts."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from moet.checkpoint import Checkpoint, Matrix
from moet.checkpoint.dequantize import dequantize_expert
from moet.errors import StoreError
from moet.kernels import expert_mlp
from moet.kernels.expert_mlp import reference
from moet.layout import RowGeometry, pack_row
from moet.models import Activation
from moet.moe import ExpertRuntime
from moet.moe.encode import row_sources, slice_bytes
from tests.cpu.checkpoint_writer import Tiny

OAI = Activation("swiglu_oai", 7.0, 1.702)


def bf16_matrix(weight: torch.Tensor, bias: torch.Tensor) -> Matrix:
    codes = weight.bfloat16().contiguous().view(torch.uint8).numpy()
    return Matrix("bf16", *weight.shape, codes, None, 1.0, bias.float().numpy(), "")


def test_gpt_oss_experts_of_transformers() -> None:
    hidden, inter, experts, tokens = 96, 80, 4, 9
    torch.manual_seed(0)
    config = SimpleNamespace(
        intermediate_size=inter, num_local_experts=experts, hidden_size=hidden, swiglu_alpha=1.702, swiglu_limit=7.0, _experts_implementation="eager"
    )
    oracle = GptOssExperts(config).double()
    with torch.no_grad():
        for parameter in oracle.parameters():   # large enough that both clamps act
            parameter.copy_((torch.randn_like(parameter) * (2 if parameter.dim() == 2 else 0.5)).bfloat16().double())
    x = torch.randn(tokens, hidden)
    ids = torch.stack([torch.randperm(experts)[:2] for _ in range(tokens)])
    weights = torch.rand(tokens, 2)
    with torch.no_grad():
        expected = oracle(x.double(), ids, weights.double()).numpy()

    geometry = RowGeometry("bf16", hidden, inter, True)
    found, clamped = np.zeros((tokens, hidden)), 0
    for e in range(experts):
        gate_up, bias = oracle.gate_up_proj[e].detach().T, oracle.gate_up_proj_bias[e].detach()
        row = np.empty(geometry.row_bytes, np.uint8)
        pack_row(
            geometry, bf16_matrix(gate_up[::2], bias[::2]), bf16_matrix(gate_up[1::2], bias[1::2]),
            bf16_matrix(oracle.down_proj[e].detach().T, oracle.down_proj_bias[e].detach()), row,
        )  # fmt: skip
        share = (torch.where(ids == e, weights, 0.0)).sum(1, keepdim=True).double().numpy()
        found += share * expert_mlp(geometry, row, x.numpy(), OAI)
        clamped += int((np.abs(x.double().numpy() @ gate_up.T.numpy() + bias.numpy()) > 7).sum())
    assert clamped > 50
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("precision", ["base", "native"])
@pytest.mark.parametrize("scheme", ["bf16", "nvfp4_modelopt", "fp8_block"])
def test_rows_encoded_on_arrival(tmp_path: Path, scheme: str, precision: str) -> None:
    Tiny(scheme, hidden=128, inter=96, experts=4).save(tmp_path)
    checkpoint = Checkpoint.open(tmp_path)
    x = torch.randn(6, 128, generator=torch.Generator().manual_seed(0))
    ids = torch.tensor([[0, 1], [2, 3], [3, 0], [1, 2], [2, 0], [3, 1]], dtype=torch.int32)
    weights = torch.full((6, 2), 0.5)
    activation = checkpoint.spec.activation
    with ExpertRuntime.from_checkpoint(checkpoint, precision=precision, threads=2) as runtime:
        found = runtime.forward(0, x, weights, ids).double().numpy()
        assert runtime.counters().rows_put == 4
        assert (runtime.report.total.weights > 0) == (precision == "base")
    expected, size = np.zeros((6, 128)), 0.0
    for e in range(4):
        gate, up, down = dequantize_expert(checkpoint.expert(0, e))
        dense = reference.activate(activation, x.double().numpy() @ gate.T, x.double().numpy() @ up.T) @ down.T
        expected += (ids.numpy() == e).sum(1)[:, None] * 0.5 * dense
    size = np.sqrt(np.mean(expected**2))
    error = np.sqrt(np.mean((found - expected) ** 2)) / size
    assert error < (2e-6 if precision == "native" else 1.0)   # 2 bits lose some 0.5 a matrix; that it is these experts is what 1.0 says
    if precision == "base":
        assert error > 1e-3


def test_a_budget_below_the_rows_is_refused_with_the_bytes(tmp_path: Path) -> None:
    Tiny("bf16", hidden=128, inter=96, experts=4).save(tmp_path)
    checkpoint = Checkpoint.open(tmp_path)
    needed = slice_bytes(row_sources(checkpoint, "native"), 0, 1)
    with pytest.raises(StoreError, match=f"{needed} bytes a rank, found a budget of {needed - 1}.*moet pack"):
        ExpertRuntime.from_checkpoint(checkpoint, precision="native", budget_bytes=needed - 1, threads=1)
    ExpertRuntime.from_checkpoint(checkpoint, precision="native", budget_bytes=needed, threads=1).close()
