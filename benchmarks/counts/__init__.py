"""Counting the instructions of machine code; benchmarks/kernel_resources.py."""
