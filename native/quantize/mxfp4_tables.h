// MXFP4 in integers. v = m / 2 * 2^s, m in {0, 1, 2, 3, 4, 6, 8, 12}; exponents e are meant relative to s and run from 2 (= floor(log2 6)) down to -5.
#pragma once
#include <cstdint>

namespace moet::mxfp4 {

inline constexpr int kHalves[8] = {0, 1, 2, 3, 4, 6, 8, 12};                  // |v| in 2^-1
inline constexpr int kTop[8] = {0, -1, 0, 0, 1, 1, 2, 2};                     // floor(log2 |v|)
inline constexpr int kMinExponent = -5, kMaxExponent = 2, kExponents = 8;

// In units of 2^-5 everything is an integer at every e.
constexpr int value32(int m) { return 16 * kHalves[m]; }
constexpr bool is_big(int m, int e) { return 2 * value32(m) > 5 << (e + 5); }
constexpr int level32(int m, int e) { return (is_big(m, e) ? 4 : 1) << (e + 5); }
constexpr int error1024(int m, int e) { const int d = value32(m) - level32(m, e); return d * d; }
constexpr int code_of(int m, int e, bool negative) { return negative ? (is_big(m, e) ? 0 : 1) : (is_big(m, e) ? 3 : 2); }

struct Tables {
  int error[kExponents][8];                                                   // [e + 5][m], 2^-10
  // By nibble: [0, 16) codes of the even column (bits 0-1) of a byte, [16, 32) of the odd one (bits 2-3). codes[1]: zeros alternate, odd columns negative.
  alignas(16) uint8_t codes[2][kExponents][32];
};

constexpr Tables make_tables() {
  Tables t{};
  for (int i = 0; i < kExponents; ++i)
    for (int m = 0; m < 8; ++m) {
      const int e = i + kMinExponent;
      t.error[i][m] = error1024(m, e);
      for (int negative = 0; negative < 2; ++negative) {
        const int nibble = 8 * negative + m;
        for (int alternate = 0; alternate < 2; ++alternate) {
          t.codes[alternate][i][nibble] = uint8_t(code_of(m, e, alternate && m == 0 ? false : negative));
          t.codes[alternate][i][16 + nibble] = uint8_t(code_of(m, e, alternate && m == 0 ? true : negative) << 2);
        }
      }
    }
  return t;
}
inline constexpr Tables kTables = make_tables();

// sum of q / 2^e from the codes of 32 columns: -4, -1, 1, 4 for 0, 1, 2, 3 is -4 + 3 * bit0 + 5 * bit1.
inline int level_sum(int low_bits, int high_bits) { return -128 + 3 * low_bits + 5 * high_bits; }

}  // namespace moet::mxfp4
