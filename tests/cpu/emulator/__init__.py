"""Runs CUDA kernels on a host without a GPU: emulator.h gives the names of kernels/gpu/gpu.cuh, build.py compiles and launches."""
