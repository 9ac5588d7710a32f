"""What benchmarks/moe_gemm.py is made of: one routed-expert layer, ours and what others offer, timed on the same inputs."""
