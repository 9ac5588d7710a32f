// Trellis codes of one group of 32 columns, under error feedback: what calibrated encoding does on a CPU.
//
// W H W^T is minimised column by column (GPTQ: Frantar et al., 2022): with U the upper Cholesky factor of H^-1, a column's error e = (w - q) / U[k][k]
// costs e^2, and e U[k][j] is taken from every later column j. Here the four survivors of the Viterbi search each carry their own feedback (per-survivor
// processing), and every candidate scale its own search.
#pragma once
#include <cstdint>

namespace moet {

constexpr int kTrellisColumns = 32;
constexpr float kTrellisTop = 15;          // the largest level

// `tcq2` of docs/row-format.md: the level of a window of two codes.
constexpr float kTrellisLevels[16] = {3, 11, -3, -9, -5, -15, 7, 1, -1, -7, 15, 5, 9, 3, -11, -3};

struct TrellisBlock {
  int64_t rows;
  int32_t columns;             // 1 to 32
  int32_t candidates;          // scales tried: those that put the group's largest magnitude at 15 / (first_share + i * share_step)
  float first_share, share_step;
  float multiplier;
  const float* target;         // [rows, columns], row stride target_stride
  int64_t target_stride;
  const float* feedback;       // U of these columns, [32, 32]
  uint8_t* codes;              // [rows, columns], strides in elements
  int64_t codes_stride;
  uint8_t* scales;             // [rows]
  int64_t scales_stride;
  float* values;               // [rows, columns]
  int64_t values_stride;
  float* errors;               // [rows, 32]: (target - value) / U[k][k], feedback included
};

}  // namespace moet
