// The float64 encoder, compiled once per instruction set: the including file sets MOET_ISA (a namespace) and MOET_LANES (doubles a vector) under its own
// target pragma. Lanes run over the rows of a matrix, so every lane does the same operations in the same order whatever their number, and the bytes and
// sums do not depend on it. No std templates in here: an instance compiled for one instruction set must not be linked into another's code.
#include "encode.h"
#include "float_tables.h"

namespace moet::MOET_ISA {
namespace {

constexpr int kLanes = MOET_LANES;
typedef double Doubles __attribute__((vector_size(8 * MOET_LANES)));
typedef int64_t Longs __attribute__((vector_size(8 * MOET_LANES)));

struct Group {                   // 32 columns of kLanes rows
  Doubles v[32];
  int columns;                   // that exist
  Longs byte, codes;
  Doubles squares, errors, unit_bias, unit_squares;
};

// How one row's 32 columns become doubles. `row`: of the matrix; `b`: block along K.
inline void decode(const Source& source, const MatrixView& m, int cols, int row, int b, int lane, Group& out) {
  double* v = reinterpret_cast<double*>(out.v) + lane;
  const int n = out.columns;
  switch (source.format) {
    case kNvfp4: {
      const uint8_t* codes = m.codes + (int64_t(row) * cols + 32 * b) / 2;
      const uint8_t* scales = static_cast<const uint8_t*>(m.scales) + (int64_t(row) * cols) / 16 + 2 * b;
      for (int half = 0; 16 * half < n; ++half) {
        const double scale = kE4m3[scales[half]] * double(m.multiplier);
        for (int i = 8 * half; i < 8 * half + 8; ++i) {
          v[2 * i * kLanes] = kE2m1[codes[i] & 15] * scale;
          v[(2 * i + 1) * kLanes] = kE2m1[codes[i] >> 4] * scale;
        }
      }
      break;
    }
    case kFp8: case kFp8Row: {
      const uint8_t* codes = m.codes + int64_t(row) * cols + 32 * b;
      const float* scales = static_cast<const float*>(m.scales);
      const double scale = source.format == kFp8 ? scales[int64_t(row / 32) * ((cols + 31) / 32) + b] : scales[row];
      for (int k = 0; k < n; ++k) v[k * kLanes] = kE4m3[codes[k]] * scale;
      break;
    }
    default: {
      const uint8_t* codes = m.codes + 2 * (int64_t(row) * cols + 32 * b);
      for (int k = 0; k < n; ++k) {
        const uint32_t bits = uint32_t(codes[2 * k] | codes[2 * k + 1] << 8) << 16;
        float f;
        __builtin_memcpy(&f, &bits, 4);
        v[k * kLanes] = f;
      }
    }
  }
}

// A cast between vectors of one size keeps the bits.
inline Longs bits_of(const Doubles& v) { return (Longs)(v); }
inline Doubles power_of_two(const Longs& e) { const Longs bits = (e + 1023) << 52; return (Doubles)(bits); }
inline Doubles magnitude(const Doubles& v) { const Longs bits = bits_of(v) & INT64_MAX; return (Doubles)(bits); }

// Chooses each row's exponent and codes, and takes the block's sums, in the order of the columns.
inline void fit(Group& g, bool alternate) {
  Doubles largest = {}, squares = {};
  for (int k = 0; k < g.columns; ++k) {
    const Doubles a = magnitude(g.v[k]);
    largest = a > largest ? a : largest;
    squares += a * a;
  }
  Longs top = (bits_of(largest) >> 52) - 1023;   // floor(log2); every non-zero value is a normal double; 0 gives -1023, hence byte 0
  Longs e[5];
  Doubles one[5], bound[5], rise[5], error[5] = {};
  for (int j = 0; j < 5; ++j) {
    e[j] = top - j;
    e[j] = e[j] < -127 ? e[j] * 0 - 127 : e[j];
    e[j] = e[j] > 127 ? e[j] * 0 + 127 : e[j];
    one[j] = power_of_two(e[j]);
    bound[j] = 2.5 * one[j];
    rise[j] = 3.0 * one[j];
  }
  for (int k = 0; k < g.columns; ++k) {
    const Doubles a = magnitude(g.v[k]);
    for (int j = 0; j < 5; ++j) {
      const Longs extra = (a > bound[j]) & bits_of(rise[j]);
      const Doubles d = a - (one[j] + (Doubles)(extra));   // 1 or 4 times 2^e: the sum is exact
      error[j] += d * d;
    }
  }
  Doubles best = error[0];
  Longs chosen = e[0];
  for (int j = 1; j < 5; ++j) {
    const Longs better = error[j] < best;
    best = better ? error[j] : best;
    chosen = better ? e[j] : chosen;
  }
  const Doubles unit = power_of_two(chosen), inverse = power_of_two(-chosen), limit = 2.5 * unit, more = 3.0 * unit;
  Doubles bias = {};
  Longs codes = {};
  for (int k = 0; k < g.columns; ++k) {
    const Doubles a = magnitude(g.v[k]);
    Longs negative = (bits_of(g.v[k]) >> 63) & 1;
    if (alternate) negative = bits_of(a) == 0 ? negative * 0 + (k & 1) : negative;
    const Longs big = a > limit, extra = big & bits_of(more), sign = negative << 63;
    const Doubles q = unit + (Doubles)(extra);
    const Longs difference = bits_of(q - a) ^ sign;                               // (q - v), both of the same sign
    bias += (Doubles)(difference) * inverse;
    codes |= (((negative ^ 1) << 1) | ((big & 1) ^ negative)) << (2 * k);
  }
  g.byte = chosen + 127;
  g.codes = codes;
  g.squares = squares;
  g.errors = best;
  g.unit_bias = bias;
  g.unit_squares = best * (inverse * inverse);
}

}  // namespace

void encode_strip(const Source& source, const bool alternate[3], const Strip& strip, uint8_t* row, RowSums sums[3]) {
  const int groups = (strip.cols + 31) / 32;
  for (int r0 = 0; r0 < kBlockRows; r0 += kLanes) {
    const Half& half = strip.half[r0 / 32];
    const int p = half.projection, valid = half.valid - r0 % 32, first = half.row + r0 % 32;   // lanes [0, valid) exist
    RowSums& s = sums[p];
    Group g;
    for (int b = 0; b < strip.blocks; ++b) {
      uint8_t* out = row + strip.offset + b * strip.stride + 4 * r0;
      uint8_t* scales = row + strip.offset + b * strip.stride + 512 + r0;
      if (valid <= 0 || b >= groups) {
        __builtin_memset(out, 0, 4 * kLanes);
        __builtin_memset(out + 256, 0, 4 * kLanes);
        __builtin_memset(scales, 0, kLanes);
        continue;
      }
      g.columns = strip.cols - 32 * b < 32 ? strip.cols - 32 * b : 32;
      for (int lane = 0; lane < kLanes; ++lane) decode(source, source.matrices[p], strip.cols, first + (lane < valid ? lane : 0), b, lane, g);
      fit(g, alternate[p]);
      for (int lane = 0; lane < kLanes; ++lane) {
        const bool exists = lane < valid;
        const uint32_t words[2] = {exists ? uint32_t(g.codes[lane]) : 0, exists ? uint32_t(uint64_t(g.codes[lane]) >> 32) : 0};
        __builtin_memcpy(out + 4 * lane, &words[0], 4);
        __builtin_memcpy(out + 256 + 4 * lane, &words[1], 4);
        scales[lane] = exists ? uint8_t(g.byte[lane]) : 0;
        if (!exists) continue;
        double* const rows[4] = {&s.squares[0] + first + lane, &s.errors[0] + first + lane, &s.unit_bias[0] + first + lane, &s.unit_squares[0] + first + lane};
        *rows[0] += g.squares[lane];
        *rows[1] += g.errors[lane];
        *rows[2] += g.unit_bias[lane];
        *rows[3] += g.unit_squares[lane];
      }
    }
  }
}

}  // namespace moet::MOET_ISA
