"""The MoE layer of one rank on a CPU: pages the routed experts in and computes them, one native call a layer."""

from moet.moe.runtime import ExpertRuntime

__all__ = ["ExpertRuntime"]
