"""The MoE layer of one rank: pages the routed experts in and computes them. `ExpertRuntime` on a CPU, one native call a layer; `DeviceRuntime` on a GPU, four launches."""

from moet.moe.device import DeviceRuntime
from moet.moe.runtime import ExpertRuntime

__all__ = ["DeviceRuntime", "ExpertRuntime"]
