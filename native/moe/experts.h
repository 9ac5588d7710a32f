// The MLPs of some experts of one layer, each on its own tokens, from row slices that are in memory.
#pragma once
#include <cstdint>
#include <vector>

#include "../include/row.h"
#include "../kernels/activations.h"
#include "pool.h"

namespace moet {

struct MlpSettings {
  RowGeometry geometry;
  int32_t tile_begin = 0, tiles = 0;   // of the slice
  bool down_bias = false;      // this rank adds it
  Activation activation;
  int32_t acts = 0;            // kernels.h: Acts
};

// One expert and its tokens. Both buffers belong to the job alone.
struct ExpertJob {
  RowView view;
  int32_t tokens = 0;
  const float* const* x = nullptr;   // [tokens] pointers to hidden floats
  uint8_t* io = nullptr;             // io_bytes(): the packed x, then float [tokens][hidden_padded], the result
  uint8_t* middle = nullptr;         // middle_bytes(): activation groups of the second GEMM
};

int64_t io_bytes(const MlpSettings& settings, int64_t tokens);
int64_t middle_bytes(const MlpSettings& settings, int64_t tokens);

// Computes all jobs. Every result is one fixed sequence of operations, so neither the threads nor the jobs beside it can change a bit.
void run_experts(Pool& pool, const MlpSettings& settings, const std::vector<ExpertJob>& jobs);

}  // namespace moet
