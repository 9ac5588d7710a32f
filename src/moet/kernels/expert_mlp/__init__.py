"""The MLP of one routed expert, from its row: x -> down @ activation(gate @ x, up @ x)."""

from moet.kernels.expert_mlp.native import ACTIVATIONS, Threads, c_activation, expert_mlp, isa, lib, set_isa

__all__ = ["ACTIVATIONS", "Threads", "c_activation", "expert_mlp", "isa", "lib", "set_isa"]
