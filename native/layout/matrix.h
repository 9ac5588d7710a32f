// The matrices of an expert, and the strips of 64 rows in which they enter a row or leave it.
#pragma once
#include <algorithm>
#include <cstdint>

#include "../include/row.h"

namespace moet {

struct MatrixView {
  const uint8_t* codes = nullptr;   // [rows, code_row_bytes]
  const void* scales = nullptr;     // as the format has them; null for bf16
  const float* bias = nullptr;      // [rows] or null
  float multiplier = 1;
};

enum Projection { kGate = 0, kUp = 1, kDown = 2 };

struct Shape {
  int rows, cols;
};
inline Shape shape_of(const RowGeometry& g, int projection) {
  return projection == kDown ? Shape{g.hidden, g.inter} : Shape{g.inter, g.hidden};
}
inline int64_t code_row_bytes(int32_t format, int cols) { return (int64_t(cols) * format_bits(format) + 7) / 8; }
inline int groups_of_32(int n) { return (n + 31) / 32; }

// 32 rows that lie in one half of a block: `valid` of them exist, the rest is padding.
struct Half {
  int projection, row, valid;
};

// 64 rows of blocks, all of K: one w13 tile (32 rows of gate, 32 of up), or 64 rows of down, whose blocks lie one in each w2 tile.
struct Strip {
  Half half[2];
  int cols = 0;              // of the matrix
  int blocks = 0;            // along K, the padded ones included
  int64_t offset = 0;        // of the first block in the row
  int64_t stride = 0;        // from a block to the next along K
};

inline Half make_half(const RowGeometry& g, int projection, int row) {
  return {projection, row, std::clamp(shape_of(g, projection).rows - row, 0, 32)};
}
inline Strip w13_strip(const RowGeometry& g, int tile) {
  return {{make_half(g, kGate, tile * kTile), make_half(g, kUp, tile * kTile)}, g.hidden, g.hidden_padded() / kBlockCols,
          tile * g.w13_tile_bytes(), block_bytes(g.format)};
}
inline Strip w2_strip(const RowGeometry& g, int index) {
  const int row = index * kBlockRows;
  return {{make_half(g, kDown, row), make_half(g, kDown, row + 32)}, g.inter, g.tiles(),
          g.w2_offset() + int64_t(index) * block_bytes(g.format), g.w2_tile_bytes()};
}
inline int w2_strips(const RowGeometry& g) { return g.hidden_padded() / kBlockRows; }

// Where things lie in the extras.
inline int64_t bias_offset(const RowGeometry& g) { return g.extras_offset() + 16; }
inline int64_t crc_offset(const RowGeometry& g) { return bias_offset(g) + g.bias_bytes(); }

// Fills a row strip by strip with `write(strip, row)`, and everything else of it: biases, multipliers, padding, checksums (each tile's while it is in cache).
struct Extras {
  float multiplier[3];
  const float* bias[3];      // gate, up, down; null if the row is not biased
};
template <typename WriteStrip>
void fill_row(const RowGeometry& g, const Extras& extras, uint8_t* row, WriteStrip&& write);

}  // namespace moet

#include "fill_row.h"
