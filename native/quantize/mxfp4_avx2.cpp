// MXFP4 with AVX2: two rows at a time, one in each half of a register. All five candidates' errors come from byte tables indexed by the nibble (pshufb),
// summed across the block (psadbw), and compared by one instruction (phminposuw), whose "lowest index wins" is the definition's "larger e wins ties".
#include "mxfp4_strip.h"
#include "mxfp4_tables.h"

#if defined(__x86_64__)
#include <immintrin.h>

namespace moet {
namespace {

using namespace mxfp4;

// Errors for a block whose largest magnitude has top = floor(log2 |v|), in units of 2^(2 top - 8): 400 at most, 12800 a block. Candidates 0 to 3 are
// multiples of 4 up to 256 and are stored divided by 4; candidate 4 is split as 16 * high + low.
struct ErrorTables {
  alignas(16) uint8_t quarter[4][16], high[16], low[16];
};
struct ByTop {
  ErrorTables top[4];                              // [top + 1]
  alignas(16) uint8_t square[16], halves[16];      // v^2 in 2^-2, v in 2^-1 plus 12
};

constexpr ByTop make_by_top() {
  ByTop t{};
  for (int nibble = 0; nibble < 16; ++nibble) {
    const int m = nibble & 7;
    t.square[nibble] = uint8_t(kHalves[m] * kHalves[m]);
    t.halves[nibble] = uint8_t(nibble & 8 ? 12 - kHalves[m] : 12 + kHalves[m]);
    for (int top = -1; top <= 2; ++top) {
      if (m && kTop[m] > top) continue;            // cannot occur
      ErrorTables& e = t.top[top + 1];
      for (int j = 0; j < 4; ++j) e.quarter[j][nibble] = uint8_t((error1024(m, top - j) >> (2 * top + 2)) / 4);
      const int last = error1024(m, top - 4) >> (2 * top + 2);
      e.high[nibble] = uint8_t(last / 16);
      e.low[nibble] = uint8_t(last % 16);
    }
  }
  return t;
}
constexpr ByTop kByTop = make_by_top();

#define MOET_AVX2 __attribute__((target("avx2,popcnt"), always_inline)) static inline

MOET_AVX2 __m128i load16(const uint8_t* p) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)); }
MOET_AVX2 __m256i load_pair(const uint8_t* a, const uint8_t* b) { return _mm256_inserti128_si256(_mm256_castsi128_si256(load16(a)), load16(b), 1); }

struct ErrorRegisters {
  __m256i quarter[4], high, low;
};
MOET_AVX2 ErrorRegisters load_errors(const ErrorTables& a, const ErrorTables& b) {
  return {{load_pair(a.quarter[0], b.quarter[0]), load_pair(a.quarter[1], b.quarter[1]), load_pair(a.quarter[2], b.quarter[2]), load_pair(a.quarter[3], b.quarter[3])},
          load_pair(a.high, b.high), load_pair(a.low, b.low)};
}

MOET_AVX2 __m256i look_up_sum(__m256i table, __m256i lo, __m256i hi) {   // per 8 bytes
  return _mm256_sad_epu8(_mm256_add_epi8(_mm256_shuffle_epi8(table, lo), _mm256_shuffle_epi8(table, hi)), _mm256_setzero_si256());
}

// Five 16-bit errors in each half, then 0xffff.
MOET_AVX2 __m256i candidate_errors(const ErrorRegisters& t, __m256i lo, __m256i hi) {
  const __m256i s01 = _mm256_or_si256(look_up_sum(t.quarter[0], lo, hi), _mm256_slli_epi64(look_up_sum(t.quarter[1], lo, hi), 16));
  const __m256i s23 = _mm256_or_si256(look_up_sum(t.quarter[2], lo, hi), _mm256_slli_epi64(look_up_sum(t.quarter[3], lo, hi), 16));
  const __m256i first = _mm256_slli_epi16(_mm256_or_si256(s01, _mm256_slli_epi64(s23, 32)), 2);
  const __m256i last = _mm256_add_epi64(_mm256_slli_epi64(look_up_sum(t.high, lo, hi), 4), look_up_sum(t.low, lo, hi));
  const __m256i sum = _mm256_add_epi16(_mm256_unpacklo_epi64(first, last), _mm256_unpackhi_epi64(first, last));
  return _mm256_or_si256(sum, _mm256_set_epi16(-1, -1, -1, 0, 0, 0, 0, 0, -1, -1, -1, 0, 0, 0, 0, 0));
}

// floor(log2) of the largest magnitude of 16 bytes of nibbles; -2: all zero.
MOET_AVX2 int top_of(__m128i x) {
  const auto any = [](__m128i v) __attribute__((target("avx2,popcnt"))) { return !_mm_testz_si128(v, v); };
  if (any(_mm_and_si128(_mm_and_si128(x, _mm_slli_epi16(x, 1)), _mm_set1_epi8(0x44)))) return 2;   // codes 6, 7
  if (any(_mm_and_si128(x, _mm_set1_epi8(0x44)))) return 1;
  if (any(_mm_and_si128(x, _mm_set1_epi8(0x22)))) return 0;
  return any(_mm_and_si128(x, _mm_set1_epi8(0x11))) ? -1 : -2;
}

MOET_AVX2 void add_sums(Mxfp4Sums& sums, int s, int top, int index, uint32_t error, uint64_t square_and_halves, uint64_t codes) {
  const int halves = int(square_and_halves >> 32) - 12 * 32;
  const int levels = level_sum(__builtin_popcountll(codes & 0x5555555555555555u), __builtin_popcountll(codes & 0xaaaaaaaaaaaaaaaau));
  sums.squares[s] += uint32_t(square_and_halves);
  sums.errors[s] += int64_t(error) << (2 * top + 2);
  sums.unit_squares += int64_t(error) << (6 + 2 * index);
  sums.unit_bias += 8 * levels - int64_t(halves) * (1 << (2 - top + index));
}

}  // namespace

__attribute__((target("avx2,popcnt"))) void encode_mxfp4_strip_avx2(const Source& source, const bool alternate[3], const Strip& strip, uint8_t* row,
                                                                    Mxfp4Sums sums[3]) {
  const Mxfp4Rows rows(source, strip);
  const ErrorRegisters usual = load_errors(kByTop.top[3], kByTop.top[3]);
  const __m256i square = load_pair(kByTop.square, kByTop.square), halves = load_pair(kByTop.halves, kByTop.halves);
  const __m256i low = _mm256_set1_epi8(15), pairs = _mm256_set1_epi16(0x1001), none = _mm256_setzero_si256();

  const auto pair = [&](int r, int b) __attribute__((target("avx2,popcnt"))) {
    uint8_t* out = row + strip.offset + b * strip.stride;
    const int p = strip.half[r / 32].projection;
    const bool both = rows.valid(r, b) && rows.valid(r + 1, b);
    const int s0 = both ? rows.scales[r][b] : 0, s1 = both ? rows.scales[r + 1][b] : 0;
    int top0 = -2, top1 = -2;
    __m256i x;
    if (both) {
      x = load_pair(rows.codes[r] + 16 * b, rows.codes[r + 1] + 16 * b);
      const __m256i six = _mm256_and_si256(_mm256_and_si256(x, _mm256_slli_epi16(x, 1)), _mm256_set1_epi8(0x44));
      const uint32_t empty = uint32_t(_mm256_movemask_epi8(_mm256_cmpeq_epi8(six, none)));
      top0 = (empty & 0xffff) != 0xffff ? 2 : top_of(_mm256_castsi256_si128(x));
      top1 = empty >> 16 != 0xffff ? 2 : top_of(_mm256_extracti128_si256(x, 1));
    }
    // Padding, all-zero blocks, and scales so extreme that a candidate's byte would be clamped.
    if (top0 == -2 || top1 == -2 || s0 < 5 || s1 < 5 || s0 > 252 || s1 > 252) {
      for (int i = r; i < r + 2; ++i)
        rows.store(out, i, rows.valid(i, b) ? encode_mxfp4_block(rows.codes[i] + 16 * b, rows.scales[i][b], alternate[p], sums[p]) : Mxfp4Block{});
      return;
    }
    const __m256i lo = _mm256_and_si256(x, low), hi = _mm256_and_si256(_mm256_srli_epi16(x, 4), low);
    const __m256i errors = candidate_errors(top0 + top1 == 4 ? usual : load_errors(kByTop.top[top0 + 1], kByTop.top[top1 + 1]), lo, hi);
    const uint32_t min0 = uint32_t(_mm_cvtsi128_si32(_mm_minpos_epu16(_mm256_castsi256_si128(errors))));
    const uint32_t min1 = uint32_t(_mm_cvtsi128_si32(_mm_minpos_epu16(_mm256_extracti128_si256(errors, 1))));
    const int index0 = int(min0 >> 16), index1 = int(min1 >> 16), e0 = top0 - index0, e1 = top1 - index1;

    const auto& even = kTables.even[alternate[p]];
    const auto& odd = kTables.odd[alternate[p]];
    const __m256i nibbles = _mm256_or_si256(_mm256_shuffle_epi8(load_pair(even[e0 - kMinExponent], even[e1 - kMinExponent]), lo),
                                            _mm256_shuffle_epi8(load_pair(odd[e0 - kMinExponent], odd[e1 - kMinExponent]), hi));
    const __m256i words = _mm256_maddubs_epi16(nibbles, pairs);
    const __m256i codes = _mm256_packus_epi16(words, words);
    const uint64_t codes0 = uint64_t(_mm256_extract_epi64(codes, 0)), codes1 = uint64_t(_mm256_extract_epi64(codes, 2));
    rows.store(out, r, {uint8_t(s0 + e0), codes0});
    rows.store(out, r + 1, {uint8_t(s1 + e1), codes1});

    const __m256i squares = _mm256_add_epi64(_mm256_sad_epu8(_mm256_shuffle_epi8(square, lo), none), _mm256_sad_epu8(_mm256_shuffle_epi8(square, hi), none));
    __m256i both_sums = _mm256_or_si256(squares, _mm256_slli_epi64(look_up_sum(halves, lo, hi), 32));
    both_sums = _mm256_add_epi64(both_sums, _mm256_shuffle_epi32(both_sums, 0x4e));
    add_sums(sums[p], s0, top0, index0, min0 & 0xffff, uint64_t(_mm256_extract_epi64(both_sums, 0)), codes0);
    add_sums(sums[p], s1, top1, index1, min1 & 0xffff, uint64_t(_mm256_extract_epi64(both_sums, 2)), codes1);
  };
  // Four blocks of a row are one cache line of the source: take them together.
  for (int b0 = 0; b0 < strip.blocks; b0 += 4)
    for (int r = 0; r < kBlockRows; r += 2)
      for (int b = b0; b < std::min(b0 + 4, strip.blocks); ++b) pair(r, b);
}

}  // namespace moet
#endif
