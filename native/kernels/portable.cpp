// Kernels without any instruction set beyond the compiler's default, and the plain statement of what the others compute: a block is decoded to
// numbers first, then multiplied. AVX2 and AVX-512 must equal it bit for bit.
#include <cmath>
#include <cstring>

#include "kernels.h"

namespace moet {
namespace portable {

float from_bits(uint32_t bits) { float f; std::memcpy(&f, &bits, 4); return f; }
float load_float(const uint8_t* p) { float f; std::memcpy(&f, p, 4); return f; }
int32_t load_int(const uint8_t* p) { int32_t i; std::memcpy(&i, p, 4); return i; }

constexpr float kSym2Values[4] = {-4, -1, 1, 4};
constexpr float kE2m1Values[16] = {0, .5f, 1, 1.5f, 2, 3, 4, 6, -0.f, -.5f, -1, -1.5f, -2, -3, -4, -6};

// Exponent and mantissa of E4M3 moved to float32's place are the value times 2^-120, subnormals too.
float e4m3(uint32_t b) { return from_bits((b & 0x80) << 24 | (b & 0x7f) << 20) * 0x1p120f; }
float ue5m3(uint32_t b) { return from_bits((b << 20) + (112u << 23)); }
float ue8m0(uint32_t b) { return from_bits(b ? b << 23 : 0x00400000u); }   // 2^-127 is a float32 subnormal

float value_of(int format, uint32_t code) {
  switch (format) {
    case kTcq2: return kTcq2Levels[code & 15];
    case kSym2: return kSym2Values[code & 3];
    case kMxfp4: case kNvfp4: return kE2m1Values[code & 15];
    case kFp8: case kFp8Row: return e4m3(code & 0xff);
    default: return from_bits(code << 16);
  }
}

float scale_of(int format, const uint8_t* block, int half, int row) {
  const uint8_t* scales = block + block_code_bytes(format);
  switch (format) {
    case kSym2: case kMxfp4: return ue8m0(scales[row]);
    case kTcq2: return ue5m3(scales[row]);
    case kNvfp4: return e4m3(scales[64 * half + row]);
    case kFp8: return load_float(scales + 4 * (row / 32));
    case kFp8Row: return load_float(scales + 4 * row);
    default: return 1.0f;
  }
}

// values[column][row]
void decode(int format, const uint8_t* block, float (&values)[kBlockCols][kBlockRows]) {
  const int bits = format_bits(format), codes = 32 / bits;
  for (int s = 0; s < bits; ++s)
    for (int row = 0; row < kBlockRows; ++row) {
      const int32_t word = load_int(block + 4 * (64 * s + row));   // the shift is arithmetic: tcq2's last level sees the sign bit more than once
      for (int j = 0; j < codes; ++j) values[s * codes + j][row] = value_of(format, uint32_t(word >> j * bits));
    }
}

template <int format>
void run_float(const BlockRun& run) {
  const int halves = format == kNvfp4 ? 2 : 1, span = kBlockCols / halves;
  float values[kBlockCols][kBlockRows];
  for (int i = 0; i < run.count; ++i) {
    const uint8_t* block = run.blocks + int64_t(i) * block_bytes(format);
    decode(format, block, values);
    for (int m = 0; m < run.tokens; ++m) {
      const float* x = reinterpret_cast<const float*>(run.acts + i * run.acts_step) + 32 * m;
      float* acc = run.acc + i * run.acc_step + m * run.acc_row;
      for (int half = 0; half < halves; ++half)
        for (int row = 0; row < kBlockRows; ++row) {
          float part = 0;
          for (int k = half * span; k < (half + 1) * span; ++k) part = std::fma(values[k][row], x[k], part);
          acc[row] = std::fma(part, scale_of(format, block, half, row), acc[row]);
        }
    }
  }
}

// Column that byte b of byte vector v holds: the order in which int_blocks.h meets the codes of a word.
int column_of(int format, int v, int b) { return format_bits(format) == 2 ? 16 * (v / 4) + 4 * b + v % 4 : 8 * (v / 2) + 2 * b + v % 2; }

template <int format, int D>
void run_int(const BlockRun& run) {
  const int halves = format == kNvfp4 ? 2 : 1, span = 8 / halves;
  float values[kBlockCols][kBlockRows];
  for (int i = 0; i < run.count; ++i) {
    const uint8_t* block = run.blocks + int64_t(i) * block_bytes(format);
    decode(format, block, values);
    for (int m = 0; m < run.tokens; ++m) {
      const uint8_t* group = run.acts + i * run.acts_step + m * group_bytes(D);
      const float scale = load_float(group + 32 * D);
      float* acc = run.acc + i * run.acc_step + m * run.acc_row;
      for (int half = 0; half < halves; ++half)
        for (int row = 0; row < kBlockRows; ++row) {
          int64_t sum = 0;     // fits 32 bits but for tcq2 at 3 bytes: group_scale bounds q so that the largest weights times it do
          int32_t all = 0;
          for (int v = half * span; v < (half + 1) * span; ++v)
            for (int b = 0; b < 4; ++b) {
              int32_t q = 0;
              for (int d = D - 1; d >= 0; --d) q = q * 256 + int8_t(group[32 * d + 4 * v + b]);
              sum += int64_t(values[column_of(format, v, b)][row] / weight_unit(format)) * q;
              all += q;
            }
          // tcq2's levels are odd, so (level - 1) / 2 is an integer, and its sum fits. At 1 and 2 bytes everything here is exact: the sum itself.
          const float group_sum = format == kTcq2 ? std::fma(float(int32_t((sum - all) / 2)), 2.0f, float(all)) : float(int32_t(sum));
          acc[row] = std::fma(group_sum, scale_of(format, block, half, row) * scale, acc[row]);
        }
    }
  }
}

template <int format>
constexpr void fill(RunBlocks (&run)[kActsKinds]) {
  run[kFp32] = run_float<format>;
  if constexpr (has_integers(format)) {
    run[kInt8] = run_int<format, 1>;
    run[kInt16] = run_int<format, 2>;
    run[kInt24] = run_int<format, 3>;
  }
}

constexpr KernelTable make_table() {
  KernelTable t{"portable", {}};
  fill<kSym2>(t.run[kSym2]);
  fill<kMxfp4>(t.run[kMxfp4]);
  fill<kNvfp4>(t.run[kNvfp4]);
  fill<kFp8>(t.run[kFp8]);
  fill<kFp8Row>(t.run[kFp8Row]);
  fill<kBf16>(t.run[kBf16]);
  fill<kTcq2>(t.run[kTcq2]);
  return t;
}

}  // namespace portable

const KernelTable& portable_kernels() {
  static constexpr KernelTable table = portable::make_table();
  return table;
}

}  // namespace moet
