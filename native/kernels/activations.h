// From hidden states to activation groups, and from gate and up sums to the second GEMM's activation groups.
#pragma once
#include <cstdint>

namespace moet {

enum ActivationKind : int32_t { kSwiglu = 0, kSwigluOai = 1 };

struct Activation {
  int32_t kind = kSwiglu;
  int32_t limited = 0;       // clamp with `limit`
  float limit = 0;
  float alpha = 1.702f;      // kSwigluOai only
};

// Writes one group of 32 activations in the format `acts` (kernels.h) for weights of `format`.
void pack_group(int format, int acts, const float* x, uint8_t* group);

// One token's x[0, hidden) as groups `group_stride` bytes apart, zero-padded to whole groups of 64 columns.
void pack_token(int format, int acts, const float* x, int hidden, uint8_t* groups, int64_t group_stride);

// out[0, count) = activation(gate, up).
//   kSwiglu:    silu(min(gate, limit)) * clamp(up, -limit, limit)             DeepSeek-V4's reference code; no clamp unless limited
//   kSwigluOai: (clamp(up, -limit, limit) + 1) * g * sigmoid(alpha * g), g = min(gate, limit)   gpt-oss
// Only IEEE additions, multiplications and divisions in a fixed order, no libm: the same bits on every machine.
void activate(const Activation& activation, const float* gate, const float* up, int count, float* out);

}  // namespace moet
