"""The model as it is trained: DeepSeek-V3 mathematics, experts stacked for grouped products.

Shapes: B sequences of S tokens, T = B * S, H hidden, E experts, k active, I expert width.
"""

import torch
import torch.nn.functional as F
from config import ModelConfig
from experts import Moe
from torch import nn


class RMSNorm(nn.Module):
    def __init__(self, width: int, eps: float):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.float()
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.eps)
        return (self.weight * y).to(x.dtype)


class Mlp(nn.Module):
    def __init__(self, hidden: int, width: int):
        super().__init__()
        self.gate_proj = nn.Linear(hidden, width, bias=False)
        self.up_proj = nn.Linear(hidden, width, bias=False)
        self.down_proj = nn.Linear(width, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of interleaved pairs: x [B, h, S, rope], cos and sin [S, rope / 2]."""
    even, odd = x[..., 0::2].float(), x[..., 1::2].float()
    return torch.cat((even * cos - odd * sin, odd * cos + even * sin), dim=-1).to(x.dtype)


class Attention(nn.Module):
    """Multi-head latent attention; in training the latents are expanded to keys and values."""

    def __init__(self, c: ModelConfig):
        super().__init__()
        self.c = c
        self.q_a_proj = nn.Linear(c.hidden, c.q_rank, bias=False)
        self.q_a_layernorm = RMSNorm(c.q_rank, c.eps)
        self.q_b_proj = nn.Linear(c.q_rank, c.heads * (c.nope + c.rope), bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(c.hidden, c.kv_rank + c.rope, bias=False)
        self.kv_a_layernorm = RMSNorm(c.kv_rank, c.eps)
        self.kv_b_proj = nn.Linear(c.kv_rank, c.heads * (c.nope + c.value), bias=False)
        self.o_proj = nn.Linear(c.heads * c.value, c.hidden, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """x [B, S, H] -> [B, S, H]"""
        c, (batch, length, _) = self.c, x.shape
        q = (
            self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
            .view(batch, length, c.heads, -1)
            .transpose(1, 2)
        )
        latent, k_rope = self.kv_a_proj_with_mqa(x).split([c.kv_rank, c.rope], dim=-1)
        kv = self.kv_b_proj(self.kv_a_layernorm(latent)).view(batch, length, c.heads, -1).transpose(1, 2)
        k_nope, v = kv.split([c.nope, c.value], dim=-1)
        k_rope = rotate(k_rope[:, None], cos, sin).expand(-1, c.heads, -1, -1)
        q = torch.cat((q[..., : c.nope], rotate(q[..., c.nope :], cos, sin)), dim=-1)
        out = F.scaled_dot_product_attention(q, torch.cat((k_nope, k_rope), dim=-1), v, is_causal=True)
        return self.o_proj(out.transpose(1, 2).reshape(batch, length, -1))


class Block(nn.Module):
    """One decoder layer; returns its output and, for an MoE layer, the routings per expert [E]."""

    def __init__(self, c: ModelConfig, dense: bool):
        super().__init__()
        self.input_layernorm = RMSNorm(c.hidden, c.eps)
        self.self_attn = Attention(c)
        self.post_attention_layernorm = RMSNorm(c.hidden, c.eps)
        self.mlp = (
            Mlp(c.hidden, c.dense_intermediate) if dense else Moe(c, Mlp(c.hidden, c.expert_intermediate))
        )
        self.dense = dense

    def forward(self, x, cos, sin, two_bit=None):
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        y = self.post_attention_layernorm(x)
        if self.dense:
            return x + self.mlp(y), None
        y, load = self.mlp(y, two_bit)
        return x + y, load


class Mtp(nn.Module):
    """The multi-token-prediction layer: from token t's hidden state and token t+1 to token t+2."""

    def __init__(self, c: ModelConfig):
        super().__init__()
        self.enorm, self.hnorm = RMSNorm(c.hidden, c.eps), RMSNorm(c.hidden, c.eps)
        self.eh_proj = nn.Linear(2 * c.hidden, c.hidden, bias=False)
        self.block = Block(c, dense=False)
        self.norm = RMSNorm(c.hidden, c.eps)

    def forward(self, embedded, hidden, cos, sin, two_bit=None):
        """embedded, hidden [B, S, H]; the embedding at position 0 is masked, as the serving engine does."""
        embedded = torch.cat((torch.zeros_like(embedded[:, :1]), embedded[:, 1:]), dim=1)
        x = self.eh_proj(torch.cat((self.enorm(embedded), self.hnorm(hidden)), dim=-1))
        x, load = self.block(x, cos, sin, two_bit)
        return self.norm(x), load


class Model(nn.Module):
    def __init__(self, c: ModelConfig):
        super().__init__()
        self.c = c
        self.embed_tokens = nn.Embedding(c.vocabulary, c.hidden)
        self.layers = nn.ModuleList(Block(c, dense=i < c.dense_layers) for i in range(c.layers))
        self.norm = RMSNorm(c.hidden, c.eps)
        self.lm_head = nn.Linear(c.hidden, c.vocabulary, bias=False)
        self.mtp = Mtp(c)
        inverse = c.theta ** -(torch.arange(0, c.rope, 2, dtype=torch.float32) / c.rope)
        angle = torch.outer(torch.arange(c.context, dtype=torch.float32), inverse)
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)

    def reset(self, std: float = 0.02) -> None:
        """Random weights: normal with `std`, norms one, biases zero."""
        for parameter in self.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=std)

    def forward(self, tokens, two_bit=None):
        """tokens [B, S + 1] -> (hidden [B, S, H], MTP hidden [B, S, H], loads [moe layers, E]).

        Hidden state i sees tokens 0..i; MTP state i also token i + 1. `two_bit` [moe layers, 2, E]
        names the experts (gate and up; down) that are rounded.
        """
        embedded = self.embed_tokens(tokens)
        length = tokens.shape[1] - 1
        cos, sin = self.cos[:length], self.sin[:length]
        x, loads, masks = (
            embedded[:, :-1],
            [],
            iter(two_bit if two_bit is not None else [None] * self.c.moe_layers),
        )
        for layer in self.layers:
            x, load = layer(x, cos, sin, None if layer.dense else next(masks))
            loads += [] if load is None else [load]
        hidden = self.norm(x)
        mtp, load = self.mtp(embedded[:, 1:], hidden, cos, sin, next(masks))
        return hidden, mtp, torch.stack(loads + [load])

    def moes(self) -> list[Moe]:
        """The MoE modules in the order of `loads`."""
        return [layer.mlp for layer in self.layers if not layer.dense] + [self.mtp.block.mlp]
