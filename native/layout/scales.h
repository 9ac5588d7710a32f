// Scales between a matrix and the blocks of a strip.
#pragma once
#include <cstring>

#include "matrix.h"

namespace moet {

inline int scale_row_length(const RowGeometry& g, int cols) { return g.format == kNvfp4 ? cols / 16 : groups_of_32(cols); }

// Copies the scales of one strip with copy(address in the matrix, address in the row, bytes). Padding is not visited.
template <typename Copy>
void for_each_scale(const RowGeometry& g, const Strip& strip, const MatrixView* matrices, const uint8_t* row, Copy&& copy) {
  if (g.format == kBf16) return;
  const int groups = groups_of_32(strip.cols), length = scale_row_length(g, strip.cols);
  for (int b = 0; b < groups; ++b) {
    const uint8_t* at = row + strip.offset + b * strip.stride + block_code_bytes(g.format);
    for (int h = 0; h < 2; ++h) {
      const Half& half = strip.half[h];
      if (!half.valid) continue;
      const uint8_t* scales = static_cast<const uint8_t*>(matrices[half.projection].scales);
      if (g.format == kFp8) {
        copy(scales + 4 * (int64_t(half.row / 32) * groups + b), at + 4 * h, 4);
      } else if (g.format == kFp8Row) {
        copy(scales + 4ll * half.row, at + 128 * h, 4 * half.valid);
      } else {
        const int per_block = g.format == kNvfp4 ? 2 : 1;
        for (int s = b * per_block; s < std::min((b + 1) * per_block, length); ++s) {
          const uint8_t* source = scales + int64_t(half.row) * length + s;
          const uint8_t* target = at + 64 * (s % per_block) + 32 * h;
          for (int r = 0; r < half.valid; ++r) copy(source + int64_t(r) * length, target + r, 1);
        }
      }
    }
  }
}

}  // namespace moet
