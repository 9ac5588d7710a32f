// Values of E2M1 and E4M3 codes in double.
#pragma once
#include <array>
#include <cstdint>

namespace moet {

inline constexpr std::array<double, 16> kE2m1 = {0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6};

constexpr std::array<double, 256> make_e4m3() {
  std::array<double, 256> t{};
  for (int i = 0; i < 128; ++i) {
    const int exponent = i >> 3, mantissa = i & 7;
    double v = exponent ? 8 + mantissa : mantissa;
    for (int k = exponent ? exponent : 1; k < 10; ++k) v /= 2;
    for (int k = 10; k < exponent; ++k) v *= 2;
    t[i] = v;
    t[i + 128] = -v;
  }
  return t;   // 0x7f and 0xff are NaN; the scan has refused them
}
inline constexpr std::array<double, 256> kE4m3 = make_e4m3();

}  // namespace moet
