// Checksums of a row slice, for whoever reads rows from a disk.
#pragma once
#include "row.h"

namespace moet {

// Checks tiles [tile_begin, tile_end) and the extras of a slice; returns how many parts do not hold. `bad`, if not null, has 2 * tiles + 1 bytes (w13 tiles,
// w2 tiles, extras; numbered in the whole row) and gets 0 or 1 for each part that was checked.
int check_slice(const RowGeometry& g, int tile_begin, int tile_end, const RowView& view, uint8_t* bad);

// The same from CRCs that were taken before, true if all hold: of the slice's w13 tiles, its w2 tiles, and the extras less their last 4 bytes.
bool crcs_hold(const RowGeometry& g, int tile_begin, int tile_end, const uint8_t* extras, const uint32_t* crcs);

}  // namespace moet
