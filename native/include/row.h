// The row: all bytes of one routed expert at one format. The definition is docs/row-format.md; layout/geometry.py is its Python twin.
#pragma once
#include <cstdint>

namespace moet {

enum Format : int32_t { kSym2 = 0, kMxfp4 = 1, kNvfp4 = 2, kFp8 = 3, kFp8Row = 4, kBf16 = 5, kTcq2 = 6 };
inline constexpr int kFormats = 7;

inline constexpr int kTile = 32;        // intermediate values a tile; the unit of tensor parallelism
inline constexpr int kBlockRows = 64;   // rows of a block (weights' N)
inline constexpr int kBlockCols = 32;   // columns of a block (weights' K)

inline constexpr int format_bits(int32_t f) { return f == kSym2 || f == kTcq2 ? 2 : f <= kNvfp4 ? 4 : f <= kFp8Row ? 8 : 16; }

// The level of a tcq2 code: kTcq2Levels[(word >> 2 * code's place) & 15], the shift arithmetic.
inline constexpr int8_t kTcq2Levels[16] = {3, 11, -3, -9, -5, -15, 7, 1, -1, -7, 15, 5, 9, 3, -11, -3};

inline constexpr int block_scale_bytes(int32_t f) {
  switch (f) {
    case kSym2: case kMxfp4: return 64;    // UE8M0 a row
    case kTcq2: return 64;                 // UE5M3 a row
    case kNvfp4: return 128;               // E4M3 a row and 16 columns
    case kFp8: return 16;                  // float32 for rows 0-31 and 32-63, 8 zero bytes
    case kFp8Row: return 256;              // float32 a row
    default: return 0;
  }
}
inline constexpr int block_code_bytes(int32_t f) { return kBlockRows * kBlockCols * format_bits(f) / 8; }
inline constexpr int block_bytes(int32_t f) { return block_code_bytes(f) + block_scale_bytes(f); }

struct RowGeometry {
  int32_t format = kSym2;
  int32_t hidden = 0, inter = 0;   // as the model has them
  int32_t biased = 0;

  int hidden_padded() const { return (hidden + 63) / 64 * 64; }
  int tiles() const { return (inter + kTile - 1) / kTile; }
  int values(int tile) const { return inter - tile * kTile < kTile ? inter - tile * kTile : kTile; }   // of the tile's 32 that are not padding
  int64_t w13_tile_bytes() const { return int64_t(hidden_padded() / kBlockCols) * block_bytes(format) + (biased ? 256 : 0); }
  int64_t w2_tile_bytes() const { return int64_t(hidden_padded() / kBlockRows) * block_bytes(format); }
  int64_t w2_offset() const { return tiles() * w13_tile_bytes(); }
  int64_t extras_offset() const { return w2_offset() + tiles() * w2_tile_bytes(); }
  int64_t bias_bytes() const { return biased ? 4ll * hidden_padded() : 0; }
  int64_t extras_used() const { return 16 + bias_bytes() + 8ll * tiles() + 4; }   // multipliers, down bias, tile CRCs, own CRC
  int64_t row_bytes() const { return (extras_offset() + extras_used() + 4095) / 4096 * 4096; }
  int64_t extras_bytes() const { return row_bytes() - extras_offset(); }
};

// A rank's part of a row: whole tiles [tile_begin, tile_end) of w13 and w2, and the extras.
struct RowSlice {
  int32_t tile_begin = 0, tile_end = 0;
  int64_t offset[3] = {0, 0, 0}, length[3] = {0, 0, 0};   // w13, w2, extras within the row
};
inline RowSlice slice_row(const RowGeometry& g, int rank, int world) {
  RowSlice s;
  s.tile_begin = int64_t(rank) * g.tiles() / world;
  s.tile_end = int64_t(rank + 1) * g.tiles() / world;
  const int64_t n = s.tile_end - s.tile_begin;
  s.offset[0] = s.tile_begin * g.w13_tile_bytes();                   s.length[0] = n * g.w13_tile_bytes();
  s.offset[1] = g.w2_offset() + s.tile_begin * g.w2_tile_bytes();    s.length[1] = n * g.w2_tile_bytes();
  s.offset[2] = g.extras_offset();                                   s.length[2] = g.extras_bytes();
  return s;
}

// A row slice as it lies in memory: its three segments need not be adjacent.
struct RowView {
  const uint8_t* w13 = nullptr;      // first tile of the slice
  const uint8_t* w2 = nullptr;
  const uint8_t* extras = nullptr;
};

}  // namespace moet
