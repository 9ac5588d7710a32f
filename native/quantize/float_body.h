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
typedef uint64_t Words64 __attribute__((vector_size(8 * MOET_LANES)));
typedef float Floats __attribute__((vector_size(4 * MOET_LANES)));
typedef uint32_t Words __attribute__((vector_size(4 * MOET_LANES)));

struct Group {                   // 32 columns of kLanes rows
  Doubles v[32];
  int columns;                   // that exist
  Longs byte, codes;
  Doubles squares, errors, unit_bias, unit_squares;
};

inline Words load_words(const uint8_t* const rows[kLanes], int offset) {
  Words w;
  for (int lane = 0; lane < kLanes; ++lane) __builtin_memcpy(reinterpret_cast<uint32_t*>(&w) + lane, rows[lane] + offset, 4);
  return w;
}

// 32 columns of all lanes, a word of codes at a time. A float's exponent field is wider than a code's, so a code shifted to the field's foot and multiplied by a
// power of two is the code's value, subnormals included.
inline void decode_e2m1(const uint8_t* const rows[kLanes], const Doubles scale[2], Doubles* v) {
  for (int w = 0; w < 4; ++w) {
    const Words word = load_words(rows, 4 * w);
    const Doubles half_scale = 0.5 * scale[w / 2];
    for (int j = 0; j < 8; ++j) {
      const Words code = word >> (4 * j), halves = (0xc8643210u >> ((code & 7) << 2)) & 15;   // |v| in halves: 0 1 2 3 4 6 8 12
      const Words bits = (Words)__builtin_convertvector(halves, Floats) | (code & 8) << 28;
      v[8 * w + j] = __builtin_convertvector((Floats)bits, Doubles) * half_scale;
    }
  }
}
inline void decode_e4m3(const uint8_t* const rows[kLanes], const Doubles& scale, Doubles* v) {
  for (int w = 0; w < 8; ++w) {
    const Words word = load_words(rows, 4 * w);
    for (int j = 0; j < 4; ++j) {
      const Words code = word >> (8 * j);
      const Floats magnitude = (Floats)((code & 0x7f) << 20) * 0x1p120f;
      v[4 * w + j] = __builtin_convertvector((Floats)((Words)magnitude | (code & 0x80) << 24), Doubles) * scale;
    }
  }
}
inline void decode_bf16(const uint8_t* const rows[kLanes], Doubles* v) {
  for (int w = 0; w < 16; ++w) {
    const Words word = load_words(rows, 4 * w);
    v[2 * w] = __builtin_convertvector((Floats)(word << 16), Doubles);
    v[2 * w + 1] = __builtin_convertvector((Floats)(word & 0xffff0000u), Doubles);
  }
}

// Block b of rows row[0..kLanes), all 32 columns of it.
inline void decode_whole(const Source& source, const MatrixView& m, int cols, const int row[kLanes], int b, Group& out) {
  const int64_t bytes = code_row_bytes(source.format, cols);
  const int offset = 4 * format_bits(source.format) * b;
  const uint8_t* rows[kLanes];
  for (int lane = 0; lane < kLanes; ++lane) rows[lane] = m.codes + row[lane] * bytes + offset;
  Doubles scale[2] = {};
  if (source.format == kNvfp4) {
    for (int lane = 0; lane < kLanes; ++lane)
      for (int half = 0; half < 2; ++half)
        scale[half][lane] = kE4m3[static_cast<const uint8_t*>(m.scales)[int64_t(row[lane]) * cols / 16 + 2 * b + half]] * double(m.multiplier);
    return decode_e2m1(rows, scale, out.v);
  }
  if (source.format == kBf16) return decode_bf16(rows, out.v);
  const float* scales = static_cast<const float*>(m.scales);
  for (int lane = 0; lane < kLanes; ++lane)
    scale[0][lane] = source.format == kFp8 ? scales[int64_t(row[lane] / 32) * ((cols + 31) / 32) + b] : scales[row[lane]];
  decode_e4m3(rows, scale[0], out.v);
}

// One row's columns where fewer than 32 are left.
inline void decode_rest(const Source& source, const MatrixView& m, int cols, int row, int b, int lane, Group& out) {
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

inline bool any(const Longs& condition) {
  int64_t bits = 0;
  for (int lane = 0; lane < kLanes; ++lane) bits |= condition[lane];
  return bits != 0;
}

// Bit i of the lower 32 to bit 2i.
inline Words64 spread(Words64 x) {
  x = (x | x << 16) & 0x0000ffff0000ffffu;
  x = (x | x << 8) & 0x00ff00ff00ff00ffu;
  x = (x | x << 4) & 0x0f0f0f0f0f0f0f0fu;
  x = (x | x << 2) & 0x3333333333333333u;
  return (x | x << 1) & 0x5555555555555555u;
}

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
  // |v| - |q|, the levels' sum 1 + 3 being exact.
  const auto difference_at = [&](int j, const Doubles& a) __attribute__((always_inline)) {
    const Longs extra = (a > bound[j]) & bits_of(rise[j]);
    return a - (one[j] + (Doubles)(extra));
  };
  const bool all_low = !any(largest > bound[0]);   // so unless the exponent was clamped from above: |v| < 2 * 2^L
  for (int k = 0; k < g.columns; ++k) {
    const Doubles a = magnitude(g.v[k]);
    const Doubles d = a - one[0];
    error[0] += d * d;
    for (int j = 1; j < 4; ++j) {
      const Doubles d = difference_at(j, a);
      error[j] += d * d;
    }
  }
  if (!all_low) {
    error[0] = Doubles{};
    for (int k = 0; k < g.columns; ++k) {
      const Doubles d = difference_at(0, magnitude(g.v[k]));
      error[0] += d * d;
    }
  }
  // A rounded sum of squares is not below any of its terms, so L - 4 cannot win where the largest value alone costs as much as another candidate does.
  Doubles least = error[0];
  for (int j = 1; j < 4; ++j) least = error[j] < least ? error[j] : least;
  const Doubles worst = difference_at(4, largest);
  if (any(worst * worst < least)) {
    for (int k = 0; k < g.columns; ++k) {
      const Doubles d = difference_at(4, magnitude(g.v[k]));
      error[4] += d * d;
    }
  } else {
    error[4] = least;   // not smaller, so not taken
  }
  Doubles best = error[0];
  Longs chosen = e[0];
  for (int j = 1; j < 5; ++j) {
    const Longs better = error[j] < best;
    best = better ? error[j] : best;
    chosen = better ? e[j] : chosen;
  }
  const Doubles unit = power_of_two(chosen), inverse = power_of_two(-chosen), limit = 2.5 * unit, more = 3.0 * unit;
  const Longs kSign = Longs{} + INT64_MIN;
  Doubles bias = {};
  Words64 negatives = {}, bigs = {}, bit = Words64{} + 1;   // bit k: column k
  for (int k = 0; k < g.columns; ++k) {
    const Doubles a = magnitude(g.v[k]);
    Longs sign = bits_of(g.v[k]) & kSign;
    if (alternate) sign = bits_of(a) == 0 ? (k & 1 ? kSign : kSign * 0) : sign;
    const Longs big = a > limit, extra = big & bits_of(more);
    const Longs difference = bits_of((unit + (Doubles)(extra)) - a) ^ sign;      // q - v, both of the same sign
    bias += (Doubles)(difference) * inverse;
    negatives |= (Words64)sign >> (63 - k);
    bigs |= (Words64)big & bit;
    bit <<= 1;
  }
  const Words64 exist = bit - 1, positives = ~negatives & exist;
  g.byte = chosen + 127;
  g.codes = (Longs)(spread(bigs ^ negatives) | spread(positives) << 1);
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
    int lane_rows[kLanes];   // a lane without a row repeats the first; its results are dropped
    for (int lane = 0; lane < kLanes; ++lane) lane_rows[lane] = first + (lane < valid ? lane : 0);
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
      if (g.columns == 32) {
        decode_whole(source, source.matrices[p], strip.cols, lane_rows, b, g);
      } else {
        for (int lane = 0; lane < kLanes; ++lane) decode_rest(source, source.matrices[p], strip.cols, lane_rows[lane], b, lane, g);
      }
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
