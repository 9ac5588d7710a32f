#include "verify.h"

#include <vector>

#include "../include/row_check.h"

namespace moet {

std::string verify_slice(const RowGeometry& g, const RowSlice& slice, const RowView& view) {
  if (check_slice(g, slice.tile_begin, slice.tile_end, view, nullptr) == 0) return {};
  const int tiles = g.tiles();
  std::vector<uint8_t> bad(2 * static_cast<size_t>(tiles) + 1);
  check_slice(g, slice.tile_begin, slice.tile_end, view, bad.data());
  if (bad.back()) return "extras";   // they hold the tiles' checksums, so the tiles say nothing then
  for (int t = 0; t < 2 * tiles; ++t)
    if (bad[t]) return (t < tiles ? "w13 tile " : "w2 tile ") + std::to_string(t % tiles);
  return "a part that was good when read again";
}

}  // namespace moet
