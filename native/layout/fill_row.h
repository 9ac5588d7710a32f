// fill_row of matrix.h: the order of work that is common to packing and encoding.
#pragma once
#include <cstring>
#include <vector>

#include "../include/crc32c.h"
#include "matrix.h"

namespace moet {

template <typename WriteStrip>
void fill_row(const RowGeometry& g, const Extras& extras, uint8_t* row, WriteStrip&& write) {
  const int tiles = g.tiles();
  std::vector<uint32_t> crc(2 * tiles, 0);
  for (int t = 0; t < tiles; ++t) {
    const Strip strip = w13_strip(g, t);
    write(strip, row);
    uint8_t* tile = row + strip.offset;
    if (g.biased) {
      float bias[kBlockRows] = {};
      for (int h = 0; h < 2; ++h)
        if (strip.half[h].valid) std::memcpy(bias + 32 * h, extras.bias[h] + strip.half[h].row, 4 * strip.half[h].valid);
      std::memcpy(tile + g.w13_tile_bytes() - sizeof bias, bias, sizeof bias);
    }
    crc[t] = crc32c(tile, g.w13_tile_bytes());
  }
  // Down goes 64 rows at a time through all w2 tiles, so that its source is read once and in order; a tile's checksum grows block by block.
  for (int i = 0; i < w2_strips(g); ++i) {
    const Strip strip = w2_strip(g, i);
    write(strip, row);
    for (int t = 0; t < tiles; ++t) crc[tiles + t] = crc32c(row + strip.offset + t * strip.stride, block_bytes(g.format), crc[tiles + t]);
  }
  uint8_t* out = row + g.extras_offset();
  std::memset(out, 0, g.extras_bytes());
  std::memcpy(out, extras.multiplier, sizeof extras.multiplier);
  if (g.biased) std::memcpy(row + bias_offset(g), extras.bias[kDown], 4ll * g.hidden);
  std::memcpy(row + crc_offset(g), crc.data(), 4 * crc.size());
  const uint32_t own = crc32c(out, g.extras_bytes() - 4);
  std::memcpy(row + g.row_bytes() - 4, &own, 4);
}

}  // namespace moet
