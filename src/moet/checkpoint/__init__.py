"""Checkpoints: safetensors folders in, native experts out, bit for bit."""

from moet.checkpoint.checkpoint import Checkpoint
from moet.checkpoint.dequantize import dequantize, dequantize_expert
from moet.checkpoint.safetensors import TensorInfo, read_header
from moet.checkpoint.source import LocalSource, ShardSource
from moet.checkpoint.weights import ExpertWeights, Matrix

__all__ = [
    "Checkpoint",
    "ExpertWeights",
    "LocalSource",
    "Matrix",
    "ShardSource",
    "TensorInfo",
    "dequantize",
    "dequantize_expert",
    "read_header",
]
