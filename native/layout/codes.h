// Code words between the rows of a matrix and the blocks of a strip. W is `const uint8_t` rows for packing or `uint8_t` rows for unpacking.
#pragma once
#include "matrix.h"

namespace moet {

struct RowPointers {
  const uint8_t* row[kBlockRows];   // null: padding
};

// Strip's codes out of the matrices into the row; all of the padding is written.
void pack_codes(int32_t format, const Strip& strip, const RowPointers& rows, uint8_t* row);
// And back; bytes of the padding are dropped.
void unpack_codes(int32_t format, const Strip& strip, const RowPointers& rows, const uint8_t* row);

inline RowPointers row_pointers(const RowGeometry& g, const Strip& strip, const MatrixView* matrices) {
  RowPointers p;
  const int64_t bytes = code_row_bytes(g.format, strip.cols);
  for (int r = 0; r < kBlockRows; ++r) {
    const Half& h = strip.half[r / 32];
    p.row[r] = r % 32 < h.valid ? matrices[h.projection].codes + (h.row + r % 32) * bytes : nullptr;
  }
  return p;
}

}  // namespace moet
