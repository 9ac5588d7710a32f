// The two GEMMs for many tokens an expert (prefill), gate_up_large and down_large: what the GPU is best at.
#pragma once
#include "../gpu/gpu.cuh"
#if MOET_ARCH == 90
#include "large_hopper.cuh"
#else
#include "large_mma.cuh"
#endif
