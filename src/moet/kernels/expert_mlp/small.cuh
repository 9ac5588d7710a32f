// The expert MLP for few tokens an expert (decoding): KERNEL mlp_small, a wave in one launch. Levels that are small integers go through the pipeline of
// small_streamed.cuh, rows of 8 and 16 bits through small_grouped.cuh, which needs less: it reads four to seven times the bytes.
#pragma once
#if FORMAT == 3 || FORMAT == 4 || FORMAT == 5
#include "small_grouped.cuh"
#else
#include "small_streamed.cuh"
#endif
