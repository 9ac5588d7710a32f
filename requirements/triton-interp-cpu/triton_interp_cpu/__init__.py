"""A Triton backend named `cpu` that only answers Triton's questions; kernels run in Triton's interpreter."""
