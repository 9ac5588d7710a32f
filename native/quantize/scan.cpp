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
  int64_t all = 0, negative = 0;
};

void count_nibbles(const uint8_t* p, int64_t n, Zeros& zeros) {
  int64_t positive = 0, negative = 0;
  for (int64_t i = 0; i < n; ++i) {
    positive += ((p[i] & 0x0f) == 0) + ((p[i] & 0xf0) == 0);
    negative += ((p[i] & 0x0f) == 0x08) + ((p[i] & 0xf0) == 0x80);
  }
  zeros.all += positive + negative;
  zeros.negative += negative;
}

#if defined(__x86_64__)
__attribute__((target("avx2"))) void count_nibbles_avx2(const uint8_t* p, int64_t n, Zeros& zeros) {
  const __m256i low = _mm256_set1_epi8(0x0f), minus = _mm256_set1_epi8(8), none = _mm256_setzero_si256();
  __m256i positive = none, negative = none;
  int64_t i = 0;
  while (i + 32 <= n) {
    __m256i plus8 = none, minus8 = none;                         // counts a byte; 2 a step, so 120 steps fit
    for (int step = 0; step < 120 && i + 32 <= n; ++step, i += 32) {
      const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + i));
      const __m256i lo = _mm256_and_si256(x, low), hi = _mm256_and_si256(_mm256_srli_epi16(x, 4), low);
      plus8 = _mm256_sub_epi8(plus8, _mm256_add_epi8(_mm256_cmpeq_epi8(lo, none), _mm256_cmpeq_epi8(hi, none)));
      minus8 = _mm256_sub_epi8(minus8, _mm256_add_epi8(_mm256_cmpeq_epi8(lo, minus), _mm256_cmpeq_epi8(hi, minus)));
    }
    positive = _mm256_add_epi64(positive, _mm256_sad_epu8(plus8, none));
    negative = _mm256_add_epi64(negative, _mm256_sad_epu8(minus8, none));
  }
  int64_t a[4], b[4];
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(a), positive);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(b), negative);
  zeros.negative += b[0] + b[1] + b[2] + b[3];
  zeros.all += a[0] + a[1] + a[2] + a[3] + b[0] + b[1] + b[2] + b[3];
  count_nibbles(p + i, n - i, zeros);
}
#endif

void scan_mxfp4(const MatrixView& m, int projection, Shape shape, Zeros& zeros) {
  const uint8_t* scales = static_cast<const uint8_t*>(m.scales);
  const int groups = shape.cols / 32;
  if (const void* bad = std::memchr(scales, 255, int64_t(shape.rows) * groups)) {
    const int64_t at = static_cast<const uint8_t*>(bad) - scales;
    refuse(projection, int(at / groups), int(at % groups) * 32, "UE8M0 scale 255 (NaN)");
  }
  const int64_t bytes = int64_t(shape.rows) * shape.cols / 2;
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2")) return count_nibbles_avx2(m.codes, bytes, zeros);
#endif
  count_nibbles(m.codes, bytes, zeros);
}

void scan_nvfp4(const MatrixView& m, int projection, Shape shape, Zeros& zeros) {
  if (!std::isfinite(m.multiplier)) refuse(projection, 0, 0, "multiplier " + std::to_string(m.multiplier));
  const uint8_t* scales = static_cast<const uint8_t*>(m.scales);
  const int groups = shape.cols / 16;
  for (int64_t i = 0; i < int64_t(shape.rows) * groups; ++i) {
    const uint8_t scale = scales[i];
    if ((scale & 0x7f) == 0x7f) refuse(projection, int(i / groups), int(i % groups) * 16, hex("E4M3 scale (NaN)", scale));
    Zeros part;
    const uint8_t* codes = m.codes + 8 * i;
    if ((scale & 0x7f) == 0 || m.multiplier == 0) {
      for (int j = 0; j < 8; ++j) part.negative += (codes[j] >> 3 & 1) + (codes[j] >> 7);
      part.all = 16;
    } else {
      count_nibbles(codes, 8, part);
    }
    const bool flip = (scale >> 7) ^ std::signbit(m.multiplier);
    zeros.all += part.all;
    zeros.negative += flip ? part.all - part.negative : part.negative;
  }
}

void scan_fp8(const MatrixView& m, int32_t format, int projection, Shape shape, Zeros& zeros) {
  const float* scales = static_cast<const float*>(m.scales);
  const int groups = groups_of_32(shape.cols);
  for (int r = 0; r < shape.rows; ++r)
    for (int b = 0; b < groups; ++b) {
      const float scale = format == kFp8 ? scales[int64_t(r / 32) * groups + b] : scales[r];
      if (!std::isfinite(scale)) refuse(projection, r, 32 * b, "scale " + std::to_string(scale));
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
