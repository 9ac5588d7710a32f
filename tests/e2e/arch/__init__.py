"""Helpers of test_architectures.py and scripts/architectures.py: rows of the table, independent references, serving."""
