// A strip of MXFP4 rows as source, and where a block of 32 columns of one of its rows goes.
#pragma once
#include <cstring>

#include "encode.h"

namespace moet {

struct Mxfp4Rows {
  const uint8_t* codes[kBlockRows];
  const uint8_t* scales[kBlockRows];   // null: padding
  int groups;

  Mxfp4Rows(const Source& source, const Strip& strip) : groups(strip.cols / 32) {
    for (int r = 0; r < kBlockRows; ++r) {
      const Half& h = strip.half[r / 32];
      const MatrixView& m = source.matrices[h.projection];
      const int64_t at = (h.row + r % 32) * int64_t(groups);
      const bool exists = r % 32 < h.valid;
      codes[r] = exists ? m.codes + 16 * at : nullptr;
      scales[r] = exists ? static_cast<const uint8_t*>(m.scales) + at : nullptr;
    }
  }
  bool valid(int r, int b) const { return scales[r] && b < groups; }

  static void store(uint8_t* block, int r, const Mxfp4Block& e) {
    const uint32_t words[2] = {uint32_t(e.codes), uint32_t(e.codes >> 32)};
    std::memcpy(block + 4 * r, &words[0], 4);
    std::memcpy(block + 256 + 4 * r, &words[1], 4);
    block[512 + r] = e.byte;
  }
};

void encode_mxfp4_strip_avx2(const Source& source, const bool alternate[3], const Strip& strip, uint8_t* row, Mxfp4Sums sums[3]);

}  // namespace moet
