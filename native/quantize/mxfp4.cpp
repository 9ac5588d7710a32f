// MXFP4, portable: the error of a candidate follows from how often each of the eight magnitudes occurs.
#include <algorithm>
#include <cstring>

#include "encode.h"
#include "mxfp4_strip.h"
#include "mxfp4_tables.h"

namespace moet {

Mxfp4Block encode_mxfp4_block(const uint8_t* nibbles, int s, bool alternate, Mxfp4Sums& sums) {
  using namespace mxfp4;
  int count[8] = {}, halves = 0;
  for (int i = 0; i < 16; ++i)
    for (int nibble : {nibbles[i] & 15, nibbles[i] >> 4}) {
      ++count[nibble & 7];
      halves += nibble & 8 ? -kHalves[nibble & 7] : kHalves[nibble & 7];
    }
  const bool zero = count[0] == 32;
  int best = 0;
  int64_t error = INT64_MAX;
  if (!zero) {
    int top = 0;
    for (int m = 1; m < 8; ++m)
      if (count[m]) top = kTop[m];
    for (int j = 0; j < 5; ++j) {
      const int e = std::clamp(top - j, -s, 254 - s);   // what a byte can hold
      int64_t sum = 0;
      for (int m = 0; m < 8; ++m) sum += int64_t(count[m]) * kTables.error[e - kMinExponent][m];
      if (sum < error) error = sum, best = e;
    }
  }
  Mxfp4Block block{uint8_t(zero ? 0 : s + best), 0};
  for (int i = 0; i < 16; ++i) {
    const uint8_t* codes = kTables.codes[alternate][best - kMinExponent];
    block.codes |= uint64_t(codes[nibbles[i] & 15] | codes[16 + (nibbles[i] >> 4)]) << (4 * i);
  }
  const int levels = level_sum(__builtin_popcountll(block.codes & 0x5555555555555555u), __builtin_popcountll(block.codes & 0xaaaaaaaaaaaaaaaau));
  if (zero) {   // q is +-2^-127, whatever s was
    sums.errors[0] += 32 << 10;
    sums.unit_squares += 32ll << 14;
    sums.unit_bias += 8 * levels;
    return block;
  }
  for (int m = 0; m < 8; ++m) sums.squares[s] += int64_t(count[m]) * kHalves[m] * kHalves[m];
  sums.errors[s] += error;
  sums.unit_squares += error << (4 - 2 * best);
  sums.unit_bias += 8 * levels - int64_t(halves) * (1 << (2 - best));
  return block;
}

void encode_mxfp4_strip(const Source& source, const bool alternate[3], const Strip& strip, uint8_t* row, Mxfp4Sums sums[3], bool portable) {
#if defined(__x86_64__)
  if (!portable && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("popcnt")) return encode_mxfp4_strip_avx2(source, alternate, strip, row, sums);
#endif
  const Mxfp4Rows rows(source, strip);
  for (int b = 0; b < strip.blocks; ++b) {
    uint8_t* out = row + strip.offset + b * strip.stride;
    for (int r = 0; r < kBlockRows; ++r) {
      const int p = strip.half[r / 32].projection;
      rows.store(out, r, rows.valid(r, b) ? encode_mxfp4_block(rows.codes[r] + 16 * b, rows.scales[r][b], alternate[p], sums[p]) : Mxfp4Block{});
    }
  }
}

}  // namespace moet
