"""The expert MLP on a GPU: the arguments of its kernels (args.cuh) and the modules that hold them, one a row format."""

import ctypes
from ctypes import c_float, c_int32, c_int64, c_void_p

from moet.errors import ConfigError
from moet.kernels.paging.state import MAX_STRIPS, LayerArgs
from moet.layout import RowGeometry, RowSlice
from moet.models import Activation

SOURCES = ("expert_mlp/small.cuh", "expert_mlp/large.cuh", "expert_mlp/combine.cuh")
NUMBERS = {"sym2": 0, "tcq2": 0, "mxfp4": 0, "nvfp4": 0, "fp8": 1, "fp8_row": 1, "bf16": 2}
"""What the small kernels multiply a format's weights with: `Numbers` of activations.cuh, two int8 planes, float16 or bf16."""


class Planes(ctypes.Structure):
    """Of activations as the small kernels read them; see args.cuh."""

    _fields_ = [(name, c_void_p) for name in ("codes", "exponents", "broken")]


class MlpArgs(ctypes.Structure):
    """Of every kernel here; see args.cuh."""

    _fields_ = [
        ("layer", LayerArgs),
        *[(name, c_void_p) for name in ("x", "act", "y", "weights", "out")],
        ("x_large", c_void_p),
        ("x_planes", Planes),
        ("act_planes", Planes),
        *[(name, c_int64) for name in ("w13", "w2", "extras", "act_stride")],
        *[(name, c_int32) for name in ("hidden", "inter", "tile_begin", "tiles", "biased", "adds_bias", "oai", "limited")],
        *[(name, c_float) for name in ("limit", "alpha")],
        *[(name, c_int32) for name in ("wave", "fetchers", "combines", "numbers", "many", "beside", "late")],
    ]


def padded(hidden: int) -> int:
    """Columns of a row of x in planes: whole chunks of 64."""
    return -(-hidden // 64) * 64


def act_stride(tiles: int) -> int:
    """Columns of a row of `act`: whole chunks of 64."""
    return -(-tiles // 2) * 64


def mlp_args(geometry: RowGeometry, part: RowSlice, segments: tuple[int, int, int], activation: Activation, rank: int) -> MlpArgs:
    """The fields that a layer's every launch shares. segments: where w13, w2 and extras start in a slot.

    Raises ConfigError for a hidden size that is no multiple of 8 (activations are read 16 bytes at a time), or above 32768 (Plan.finished counts strips of 64).
    """
    if geometry.hidden % 8 or geometry.hidden > 64 * MAX_STRIPS:
        raise ConfigError(f"hidden size: expected a multiple of 8, at most {64 * MAX_STRIPS}, on a GPU, found {geometry.hidden}")
    tiles = part.tile_end - part.tile_begin
    return MlpArgs(
        w13=segments[0], w2=segments[1], extras=segments[2], act_stride=act_stride(tiles), hidden=geometry.hidden, inter=geometry.inter,
        tile_begin=part.tile_begin, tiles=tiles, biased=geometry.biased, adds_bias=rank == 0, oai=activation.kind == "swiglu_oai",
        limited=activation.limit is not None, limit=activation.limit or 0.0, alpha=activation.alpha, numbers=NUMBERS[geometry.format],
    )  # fmt: skip
