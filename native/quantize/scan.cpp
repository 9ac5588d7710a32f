// The first pass: is everything finite, and which signs do the zeros have.
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <string>

#include "encode.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace moet {
namespace {

[[noreturn]] void refuse(int projection, int row, int column, const std::string& what) {
  static const char* const kNames[3] = {"gate", "up", "down"};
  throw std::runtime_error(std::string(kNames[projection]) + ", row " + std::to_string(row) + ", column " + std::to_string(column) + ": expected a finite value, found " + what);
}

std::string hex(const char* what, unsigned value) {
  char text[64];
  std::snprintf(text, sizeof text, "%s 0x%02x", what, value);
  return text;
}

struct Zeros {
  int64_t all = 0, negative = 0, nan = 0;
};

// Two nibbles (E2M1), or one byte (E4M3), at a time.
struct E2m1 {
  static void count(uint8_t x, Zeros& zeros) {
    const int negative = ((x & 0x0f) == 0x08) + ((x & 0xf0) == 0x80);
    zeros.all += ((x & 0x07) == 0) + ((x & 0x70) == 0);
    zeros.negative += negative;
  }
};
struct E4m3 {
  static void count(uint8_t x, Zeros& zeros) {
    zeros.all += (x & 0x7f) == 0;
    zeros.negative += x == 0x80;
    zeros.nan += (x & 0x7f) == 0x7f;
  }
};

#if defined(__x86_64__)
// Counts in bytes, at most 2 a step, so 120 steps fit before they are widened.
template <typename Step>
__attribute__((target("avx2"))) int64_t count_steps(const uint8_t* p, int64_t n, Step step, Zeros& zeros) {
  const __m256i none = _mm256_setzero_si256();
  __m256i wide[3] = {none, none, none};
  int64_t i = 0;
  while (i + 32 <= n) {
    __m256i narrow[3] = {none, none, none};
    for (int k = 0; k < 120 && i + 32 <= n; ++k, i += 32) step(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + i)), narrow);
    for (int j = 0; j < 3; ++j) wide[j] = _mm256_add_epi64(wide[j], _mm256_sad_epu8(narrow[j], none));
  }
  int64_t sums[3][4];
  for (int j = 0; j < 3; ++j) _mm256_storeu_si256(reinterpret_cast<__m256i*>(sums[j]), wide[j]);
  const auto total = [&](int j) { return sums[j][0] + sums[j][1] + sums[j][2] + sums[j][3]; };
  zeros.all += total(0);
  zeros.negative += total(1);
  zeros.nan += total(2);
  return i;
}
__attribute__((target("avx2"))) int64_t count_avx2(E2m1, const uint8_t* p, int64_t n, Zeros& zeros) {
  return count_steps(p, n, [](__m256i x, __m256i* c) __attribute__((target("avx2"))) {
    const __m256i none = _mm256_setzero_si256(), low = _mm256_and_si256(x, _mm256_set1_epi8(0x0f)), high = _mm256_andnot_si256(_mm256_set1_epi8(0x0f), x);
    const __m256i negative = _mm256_add_epi8(_mm256_cmpeq_epi8(low, _mm256_set1_epi8(0x08)), _mm256_cmpeq_epi8(high, _mm256_set1_epi8(int8_t(0x80))));
    const __m256i positive = _mm256_add_epi8(_mm256_cmpeq_epi8(low, none), _mm256_cmpeq_epi8(high, none));
    c[0] = _mm256_sub_epi8(c[0], _mm256_add_epi8(positive, negative));
    c[1] = _mm256_sub_epi8(c[1], negative);
  }, zeros);
}
__attribute__((target("avx2"))) int64_t count_avx2(E4m3, const uint8_t* p, int64_t n, Zeros& zeros) {
  return count_steps(p, n, [](__m256i x, __m256i* c) __attribute__((target("avx2"))) {
    const __m256i magnitude = _mm256_and_si256(x, _mm256_set1_epi8(0x7f));
    c[0] = _mm256_sub_epi8(c[0], _mm256_cmpeq_epi8(magnitude, _mm256_setzero_si256()));
    c[1] = _mm256_sub_epi8(c[1], _mm256_cmpeq_epi8(x, _mm256_set1_epi8(int8_t(0x80))));
    c[2] = _mm256_sub_epi8(c[2], _mm256_cmpeq_epi8(magnitude, _mm256_set1_epi8(0x7f)));
  }, zeros);
}
#endif

template <typename Code>
void count(const uint8_t* p, int64_t n, Zeros& zeros) {
  int64_t i = 0;
#if defined(__x86_64__)
  static const bool avx2 = __builtin_cpu_supports("avx2");
  if (avx2) i = count_avx2(Code{}, p, n, zeros);
#endif
  for (; i < n; ++i) Code::count(p[i], zeros);
}

void scan_mxfp4(const MatrixView& m, int projection, Shape shape, Zeros& zeros) {
  const uint8_t* scales = static_cast<const uint8_t*>(m.scales);
  const int groups = shape.cols / 32;
  if (const void* bad = std::memchr(scales, 255, int64_t(shape.rows) * groups)) {
    const int64_t at = static_cast<const uint8_t*>(bad) - scales;
    refuse(projection, int(at / groups), int(at % groups) * 32, "UE8M0 scale 255 (NaN)");
  }
  count<E2m1>(m.codes, int64_t(shape.rows) * shape.cols / 2, zeros);
}

void scan_nvfp4(const MatrixView& m, int projection, Shape shape, Zeros& zeros) {
  if (!std::isfinite(m.multiplier)) refuse(projection, 0, 0, "multiplier " + std::to_string(m.multiplier));
  const uint8_t* scales = static_cast<const uint8_t*>(m.scales);
  const int groups = shape.cols / 16;
  const int64_t all_groups = int64_t(shape.rows) * groups;
  bool plain = m.multiplier > 0;   // every scale positive: a value's zeros and signs are its code's
  for (int64_t i = 0; i < all_groups; ++i) {
    if ((scales[i] & 0x7f) == 0x7f) refuse(projection, int(i / groups), int(i % groups) * 16, hex("E4M3 scale (NaN)", scales[i]));
    plain &= uint8_t(scales[i] - 1) < 0x7e;
  }
  if (plain) return count<E2m1>(m.codes, 8 * all_groups, zeros);
  for (int64_t i = 0; i < all_groups; ++i) {
    const uint8_t scale = scales[i];
    Zeros part;
    const uint8_t* codes = m.codes + 8 * i;
    if ((scale & 0x7f) == 0 || m.multiplier == 0) {
      for (int j = 0; j < 8; ++j) part.negative += (codes[j] >> 3 & 1) + (codes[j] >> 7);
      part.all = 16;
    } else {
      count<E2m1>(codes, 8, part);
    }
    const bool flip = (scale >> 7) ^ std::signbit(m.multiplier);
    zeros.all += part.all;
    zeros.negative += flip ? part.all - part.negative : part.negative;
  }
}

void scan_fp8(const MatrixView& m, int32_t format, int projection, Shape shape, Zeros& zeros) {
  const float* scales = static_cast<const float*>(m.scales);
  const int groups = groups_of_32(shape.cols);
  const int64_t scale_cols = format == kFp8 ? groups : 1, scale_rows = format == kFp8 ? groups_of_32(shape.rows) : shape.rows;
  bool plain = true;   // every scale positive: a value's zeros and signs are its code's
  for (int64_t i = 0; i < scale_rows * scale_cols; ++i) {
    if (!std::isfinite(scales[i])) refuse(projection, int(i / scale_cols) * (format == kFp8 ? 32 : 1), int(i % scale_cols) * 32, "scale " + std::to_string(scales[i]));
    plain &= scales[i] > 0;
  }
  if (plain) {
    count<E4m3>(m.codes, int64_t(shape.rows) * shape.cols, zeros);
    if (!zeros.nan) return;
    zeros = {};   // the walk below finds it
  }
  for (int r = 0; r < shape.rows; ++r)
    for (int b = 0; b < groups; ++b) {
      const float scale = format == kFp8 ? scales[int64_t(r / 32) * groups + b] : scales[r];
      const uint8_t* codes = m.codes + int64_t(r) * shape.cols + 32 * b;
      const int n = std::min(32, shape.cols - 32 * b);
      int all = 0, negative = 0, nan = 0, signs = 0;
      for (int k = 0; k < n; ++k) {
        all += (codes[k] & 0x7f) == 0;
        negative += codes[k] == 0x80;
        signs += codes[k] >> 7;
        nan += (codes[k] & 0x7f) == 0x7f;
      }
      if (nan)
        for (int k = 0; k < n; ++k)
          if ((codes[k] & 0x7f) == 0x7f) refuse(projection, r, 32 * b + k, hex("E4M3 code (NaN)", codes[k]));
      if (scale == 0) all = n, negative = signs;
      zeros.all += all;
      zeros.negative += std::signbit(scale) ? all - negative : negative;
    }
}

void scan_bf16(const MatrixView& m, int projection, Shape shape, Zeros& zeros) {
  for (int r = 0; r < shape.rows; ++r) {
    const uint8_t* codes = m.codes + 2ll * r * shape.cols;
    int64_t all = 0, negative = 0, bad = 0;
    const auto at = [&](int k) { uint16_t v; std::memcpy(&v, codes + 2 * k, 2); return v; };
    for (int k = 0; k < shape.cols; ++k) {
      all += (at(k) & 0x7fff) == 0;
      negative += at(k) == 0x8000;
      bad += (at(k) & 0x7f80) == 0x7f80;
    }
    if (bad)
      for (int k = 0; k < shape.cols; ++k)
        if ((at(k) & 0x7f80) == 0x7f80) refuse(projection, r, k, hex(at(k) & 0x7f ? "BF16 NaN" : "BF16 infinity", at(k)));
    zeros.all += all;
    zeros.negative += negative;
  }
}

}  // namespace

void scan_matrix(const Source& source, int projection, EncodeReport& report) {
  const MatrixView& m = source.matrices[projection];
  const Shape shape = shape_of(*source.geometry, projection);
  Zeros zeros;
  switch (source.format) {
    case kMxfp4: scan_mxfp4(m, projection, shape, zeros); break;
    case kNvfp4: scan_nvfp4(m, projection, shape, zeros); break;
    case kFp8: case kFp8Row: scan_fp8(m, source.format, projection, shape, zeros); break;
    case kBf16: scan_bf16(m, projection, shape, zeros); break;
    default: throw std::runtime_error("source format " + std::to_string(source.format) + ": cannot be encoded");
  }
  report.zeros = zeros.all;
  report.negative_zeros = zeros.negative;
}

}  // namespace moet
