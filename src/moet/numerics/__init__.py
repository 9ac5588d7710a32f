"""Number formats as pure functions: bytes to values by table, exact in float32 and float64."""

from moet.numerics.e2m1 import E2M1, decode_e2m1, pack_e2m1, unpack_e2m1
from moet.numerics.e4m3 import E4M3, decode_e4m3
from moet.numerics.floats import narrow_bf16, widen_bf16, widen_f16
from moet.numerics.tcq2 import TCQ2_LEVELS, decode_tcq2, tcq2_windows
from moet.numerics.ue5m3 import UE5M3, decode_ue5m3
from moet.numerics.ue8m0 import UE8M0, decode_ue8m0, ue8m0_has_nan

__all__ = [
    "E2M1",
    "E4M3",
    "TCQ2_LEVELS",
    "UE5M3",
    "UE8M0",
    "decode_e2m1",
    "decode_e4m3",
    "decode_tcq2",
    "decode_ue5m3",
    "decode_ue8m0",
    "narrow_bf16",
    "pack_e2m1",
    "tcq2_windows",
    "ue8m0_has_nan",
    "unpack_e2m1",
    "widen_bf16",
    "widen_f16",
]
