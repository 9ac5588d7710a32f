"""CPU kernels: one folder per op, the plain reference beside it. docs/kernels-cpu.md explains them."""

from moet.kernels.expert_mlp import ACTIVATIONS, Threads, expert_mlp, isa, set_isa

__all__ = ["ACTIVATIONS", "Threads", "expert_mlp", "isa", "set_isa"]
