// MXFP4 with AVX2: two rows at a time, one in each half of a register. The candidates' errors come from byte tables indexed by the nibble (pshufb), summed
// across the block (psadbw), and compared by one instruction (phminposuw), whose "lowest index wins" is the definition's "larger e wins ties".
#include <algorithm>

#include "mxfp4_strip.h"
#include "mxfp4_tables.h"

#if defined(__x86_64__)
#include <immintrin.h>

namespace moet {
namespace {

using namespace mxfp4;

#define MOET_AVX2 __attribute__((target("avx2,popcnt"), always_inline)) static inline

// Exponents 2 down to -2 serve every block whose largest magnitude is 3, 4 or 6, which is what scales of the usual kinds give:
//   4 or 6: they are the five candidates.
//   3: the candidates are 1 down to -3. -3 never wins, because going there from -2 adds 9/4 for the 3 and saves at most 1/16 for each of the others; and 2 is
//      never better than 1, and as good only if all 32 are 3 (every |v| <= 3 is nearer to 2 than to 4, and 3 is as near), a case left to the portable code.
// Errors in 2^-4: 400 at most, 12800 a block. For e >= -1 they are multiples of 4 and stored as quarters; e = -2 is split into whole units and the rest.
struct ErrorTables {
  alignas(16) uint8_t quarters[4][16], whole[16], rest[16];
  alignas(16) uint8_t square[16], halves[16];   // v^2 in 2^-2; v in 2^-1, plus 12
  alignas(16) uint8_t levels[16];               // of two codes: sum of q / 2^e, plus 8
};

constexpr ErrorTables make_error_tables() {
  ErrorTables t{};
  constexpr int kLevel[4] = {-4, -1, 1, 4};
  for (int nibble = 0; nibble < 16; ++nibble) {
    const int m = nibble & 7;
    for (int j = 0; j < 4; ++j) t.quarters[j][nibble] = uint8_t(error1024(m, 2 - j) >> 8);
    t.whole[nibble] = uint8_t(error1024(m, -2) >> 10);
    t.rest[nibble] = uint8_t((error1024(m, -2) >> 6) % 16);
    t.square[nibble] = uint8_t(kHalves[m] * kHalves[m]);
    t.halves[nibble] = uint8_t(nibble & 8 ? 12 - kHalves[m] : 12 + kHalves[m]);
    t.levels[nibble] = uint8_t(kLevel[nibble & 3] + kLevel[nibble >> 2] + 8);
  }
  return t;
}
constexpr ErrorTables kErrors = make_error_tables();

// The tables by an address the compiler cannot see through. Otherwise it builds each one from two immediates, four instructions in place of one load, in every block.
MOET_AVX2 const ErrorTables& error_tables() {
  const ErrorTables* t = &kErrors;
  asm("" : "+r"(t));
  return *t;
}

MOET_AVX2 __m128i load16(const uint8_t* p) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)); }
MOET_AVX2 __m256i load_pair(const uint8_t* a, const uint8_t* b) { return _mm256_inserti128_si256(_mm256_castsi128_si256(load16(a)), load16(b), 1); }
MOET_AVX2 __m256i table(const uint8_t* t) { return _mm256_broadcastsi128_si256(load16(t)); }
MOET_AVX2 __m256i bytes_sum(__m256i v) { return _mm256_sad_epu8(v, _mm256_setzero_si256()); }   // of 8 bytes each

struct Nibbles {
  __m256i low, high;
};
MOET_AVX2 __m256i sum_of(const uint8_t* t, const Nibbles& n) {
  return bytes_sum(_mm256_add_epi8(_mm256_shuffle_epi8(table(t), n.low), _mm256_shuffle_epi8(table(t), n.high)));
}

// Whether a half has neither a magnitude of 3 or more nor anything but threes (or a mixture of such bytes, which the portable code does as well).
MOET_AVX2 bool is_unusual(__m256i x) {
  const __m256i upper = _mm256_or_si256(_mm256_slli_epi16(x, 1), _mm256_slli_epi16(x, 2));   // bit 2 set and one below: codes 5, 6, 7
  const __m256i three = _mm256_and_si256(_mm256_and_si256(x, upper), _mm256_set1_epi8(0x44));
  const __m256i small = _mm256_cmpeq_epi8(three, _mm256_setzero_si256());
  const __m256i threes = _mm256_cmpeq_epi8(_mm256_and_si256(x, _mm256_set1_epi8(0x77)), _mm256_set1_epi8(0x55));
  const uint32_t mask = uint32_t(_mm256_movemask_epi8(_mm256_or_si256(small, threes)));
  return (mask & 0xffff) == 0xffff || mask >> 16 == 0xffff;
}

// Of each half: bits 0-15 the smallest error, bits 16-18 its index (2 - e), zeros above.
struct Best {
  __m128i first, second;
};
MOET_AVX2 Best best_exponents(const ErrorTables& t, const Nibbles& n) {
  const __m256i s01 = _mm256_or_si256(sum_of(t.quarters[0], n), _mm256_slli_epi64(sum_of(t.quarters[1], n), 16));
  const __m256i s23 = _mm256_or_si256(sum_of(t.quarters[2], n), _mm256_slli_epi64(sum_of(t.quarters[3], n), 16));
  const __m256i first = _mm256_slli_epi16(_mm256_or_si256(s01, _mm256_slli_epi64(s23, 32)), 2);
  const __m256i last = _mm256_add_epi64(_mm256_slli_epi64(sum_of(t.whole, n), 4), sum_of(t.rest, n));
  const __m256i sums = _mm256_add_epi16(_mm256_unpacklo_epi64(first, last), _mm256_unpackhi_epi64(first, last));
  const __m256i errors = _mm256_or_si256(sums, _mm256_set_epi64x(int64_t(0xffffffffffff0000), 0, int64_t(0xffffffffffff0000), 0));
  return {_mm_minpos_epu16(_mm256_castsi256_si128(errors)), _mm_minpos_epu16(_mm256_extracti128_si256(errors, 1))};
}

// Sums of one half of a strip. by_scale: squares (2^-2) in bits 0-31, errors (2^-4) above; a call of encode_half adds at most 32 * 4 * 12800 to a word.
struct HalfSums {
  uint64_t by_scale[256] = {};
  int64_t blocks = 0;

  void flush(Mxfp4Sums& sums) {
    for (int s = 0; s < 256; ++s) {
      sums.squares[s] += uint32_t(by_scale[s]);
      sums.errors[s] += int64_t(by_scale[s] >> 32) << 6;
      by_scale[s] = 0;
    }
  }
};

MOET_AVX2 int64_t total(__m256i v) {
  return _mm256_extract_epi64(v, 0) + _mm256_extract_epi64(v, 1) + _mm256_extract_epi64(v, 2) + _mm256_extract_epi64(v, 3);
}

// Blocks [b0, b1) of the 32 rows of one half.
__attribute__((target("avx2,popcnt"))) void encode_half(const Mxfp4Rows& rows, int r0, int b0, int b1, bool alternate, uint8_t* out, int64_t stride,
                                                        Mxfp4Sums& sums, HalfSums& half) {
  __m256i unit_squares = _mm256_setzero_si256(), unit_bias = _mm256_setzero_si256();
  const uint8_t* const codes_of = kTables.codes[alternate][0];
  const ErrorTables& t = error_tables();
  for (int r = r0; r < r0 + 32; r += 2) {
    const uint8_t *a = rows.codes[r], *b = rows.codes[r + 1];
    const bool two = rows.scales[r + 1];
    if (two) {   // 64 rows are more streams than the CPU follows by itself: without this a third of the time went into waiting for lines
      _mm_prefetch(reinterpret_cast<const char*>(a + 16 * b1), _MM_HINT_T0);
      _mm_prefetch(reinterpret_cast<const char*>(b + 16 * b1), _MM_HINT_T0);
    }
    uint8_t* block = out;
    for (int i = b0; i < b1; ++i, block += stride) {
      const bool both = two && i < rows.groups;
      const int s0 = both ? rows.scales[r][i] : 0, s1 = both ? rows.scales[r + 1][i] : 0;
      const __m256i x = both ? load_pair(a + 16 * i, b + 16 * i) : _mm256_setzero_si256();
      // Scales at which a candidate's byte might be clamped go the portable way too.
      if (unsigned(s0 - 5) > 247 || unsigned(s1 - 5) > 247 || is_unusual(x)) {
        for (int j = r; j < r + 2; ++j)
          rows.store(block, j, rows.valid(j, i) ? encode_mxfp4_block(rows.codes[j] + 16 * i, rows.scales[j][i], alternate, sums) : Mxfp4Block{});
        continue;
      }
      const __m256i low = _mm256_set1_epi8(15);
      const Nibbles n{_mm256_and_si256(x, low), _mm256_and_si256(_mm256_srli_epi16(x, 4), low)};
      const Best both_best = best_exponents(t, n);
      const int index0 = _mm_extract_epi16(both_best.first, 1), index1 = _mm_extract_epi16(both_best.second, 1);
      const uint8_t *t0 = codes_of + 32 * (2 - index0 - kMinExponent), *t1 = codes_of + 32 * (2 - index1 - kMinExponent);
      const __m256i quads = _mm256_or_si256(_mm256_shuffle_epi8(load_pair(t0, t1), n.low), _mm256_shuffle_epi8(load_pair(t0 + 16, t1 + 16), n.high));
      const __m256i words = _mm256_maddubs_epi16(quads, _mm256_set1_epi16(0x1001));
      const __m256i codes = _mm256_packus_epi16(words, words);
      rows.store(block, r, {uint8_t(s0 + 2 - index0), uint64_t(_mm256_extract_epi64(codes, 0))});
      rows.store(block, r + 1, {uint8_t(s1 + 2 - index1), uint64_t(_mm256_extract_epi64(codes, 2))});

      const __m256i best = _mm256_inserti128_si256(_mm256_castsi128_si256(both_best.first), both_best.second, 1);
      const __m256i error = _mm256_and_si256(best, _mm256_set1_epi64x(0xffff)), index = _mm256_srli_epi64(_mm256_shuffle_epi32(best, 0x44), 16);
      unit_squares = _mm256_add_epi64(unit_squares, _mm256_sllv_epi64(error, _mm256_add_epi64(index, index)));                          // 2^-8
      const __m256i halves = _mm256_sub_epi64(sum_of(t.halves, n), _mm256_set1_epi64x(16 * 12));
      const __m256i levels = bytes_sum(_mm256_shuffle_epi8(table(t.levels), quads));
      unit_bias = _mm256_add_epi64(unit_bias, _mm256_sub_epi64(_mm256_slli_epi64(levels, 3), _mm256_sllv_epi64(halves, index)));         // 2^-3
      const __m256i square = _mm256_add_epi64(bytes_sum(_mm256_shuffle_epi8(table(t.square), n.low)), bytes_sum(_mm256_shuffle_epi8(table(t.square), n.high)));
      const __m256i both_sums = _mm256_or_si256(_mm256_add_epi64(square, _mm256_shuffle_epi32(square, 0x4e)), _mm256_slli_epi64(error, 32));
      half.by_scale[s0] += uint64_t(_mm256_extract_epi64(both_sums, 0));
      half.by_scale[s1] += uint64_t(_mm256_extract_epi64(both_sums, 2));
      half.blocks += 2;
    }
  }
  sums.unit_squares += total(unit_squares) << 6;
  sums.unit_bias += total(unit_bias);
}

}  // namespace

__attribute__((target("avx2,popcnt"))) void encode_mxfp4_strip_avx2(const Source& source, const bool alternate[3], const Strip& strip, uint8_t* row,
                                                                    Mxfp4Sums sums[3]) {
  const Mxfp4Rows rows(source, strip);
  HalfSums half[2];
  for (int b0 = 0; b0 < strip.blocks; b0 += 4)   // a row's four blocks are one cache line of the source
    for (int h = 0; h < 2; ++h) {
      const int p = strip.half[h].projection;
      encode_half(rows, 32 * h, b0, std::min(b0 + 4, strip.blocks), alternate[p], row + strip.offset + b0 * strip.stride, strip.stride, sums[p], half[h]);
      if (b0 + 4 >= strip.blocks || b0 % 4096 == 4092) half[h].flush(sums[p]);   // 4096 blocks of 32 rows: under 2^31
    }
  for (int h = 0; h < 2; ++h) sums[strip.half[h].projection].unit_bias -= half[h].blocks * (16 * 8 * 8);   // the levels' offsets
}

}  // namespace moet
#endif
