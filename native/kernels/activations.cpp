#include "activations.h"

#include <cmath>
#include <cstring>
#include <limits>

#include "kernels.h"

namespace moet {
namespace {

float from_bits(uint32_t bits) { float f; std::memcpy(&f, &bits, 4); return f; }
uint32_t to_bits(float f) { uint32_t u; std::memcpy(&u, &f, 4); return u; }

// e^x within 2 ulp. x = n ln2 + r, |r| <= ln2/2; e^r by its Taylor polynomial of degree 7 (error 2e-9 relative at the ends).
// The range is cut where e^x leaves float32's normal numbers: there the sigmoid is 0 or 1 to float32 already.
inline float exp_fixed(float x) {
  x = x < -87.0f ? -87.0f : x > 88.0f ? 88.0f : x;
  const float shifted = x * 1.44269504f + 12582912.0f;   // 1.5 * 2^23: the sum's low bits are the rounded integer
  const float n = shifted - 12582912.0f;
  const float r = (x - n * 0.693359375f) - n * -2.12194440e-4f;   // ln2 in two parts; the first product is exact
  float p = 1.0f / 5040;
  p = p * r + 1.0f / 720;
  p = p * r + 1.0f / 120;
  p = p * r + 1.0f / 24;
  p = p * r + 1.0f / 6;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  return p * from_bits((to_bits(shifted) + 127) << 23);   // the shift leaves n + 127 alone
}

inline float sigmoid(float x) { return 1.0f / (1.0f + exp_fixed(-x)); }

// Where column k's byte of a digit goes: byte vector v takes columns 16 (v / 4) + 4 b + v % 4 of 2-bit words, 8 (v / 2) + 2 b + v % 2 of 4-bit words.
struct Places {
  uint8_t two_bits[32], e2m1[32];
};
constexpr Places make_places() {
  Places p{};
  for (int k = 0; k < 32; ++k) {
    p.two_bits[k] = uint8_t(4 * (4 * (k / 16) + k % 4) + k % 16 / 4);
    p.e2m1[k] = uint8_t(4 * (2 * (k / 8) + k % 2) + k % 8 / 2);
  }
  return p;
}
constexpr Places kPlaces = make_places();

// Largest |q|: D balanced bytes reach 127 * (1 + 256 + ...); with 3 bytes the group's sum of 32 products of up to 12 (E2M1)
// must fit 31 bits too. So does that of 32 products of up to 8, sym2's and half of tcq2's: 2 139 062 016.
int32_t largest(int format, int acts) {
  if (acts == kInt24) return format == kMxfp4 ? 5592405 : 8355711;
  return acts == kInt16 ? 32639 : 127;
}

// One byte uses its whole range; more bytes use a power of two, which makes values within 2^8 (2 bytes) or 2^15 (3) of the largest exact if
// they came from bfloat16.
float group_scale(int format, int acts, float amax) {
  const int32_t limit = largest(format, acts);
  if (acts == kInt8) return amax / float(limit);
  int32_t exponent = int32_t(to_bits(amax) >> 23) - 126;  // amax < 2^exponent
  exponent -= 8 * acts - 1;
  if (exponent < -126) exponent = -126;                   // a tiny group: the scale stays normal, its reciprocal finite
  float scale = from_bits(uint32_t(exponent + 127) << 23);
  while (amax > float(limit) * scale) scale *= 2;         // at most twice
  return scale;
}

}  // namespace

void pack_group(int format, int acts, const float* x, uint8_t* group) {
  if (acts == kFp32) {
    std::memcpy(group, x, 128);
    return;
  }
  float amax = 0, poison = 0;
  for (int k = 0; k < 32; ++k) {
    const float a = std::fabs(x[k]);
    amax = a > amax ? a : amax;
    poison += x[k] * 0.0f;                                // NaN if any x is not finite: then so is the result, as with float32 products
  }
  std::memset(group, 0, size_t(group_bytes(acts)));
  float scale = 0;
  int32_t corrections[2] = {0, 0};
  if (amax > 0 && poison == 0) {
    scale = group_scale(format, acts, amax);
    const float inverse = 1.0f / scale;
    const int32_t limit = largest(format, acts);
    int32_t q[32];
    for (int k = 0; k < 32; ++k) {
      const float v = x[k] * inverse;
      const int32_t n = int32_t(v + (v < 0 ? -0.5f : 0.5f));
      q[k] = n > limit ? limit : n < -limit ? -limit : n;
    }
    uint32_t half[2] = {0, 0};
    for (int h = 0; h < 2; ++h)
      for (int k = 0; k < 16; ++k) half[h] += uint32_t(q[16 * h + k]);
    const uint32_t bias = uint32_t(weight_bias(format));  // modulo 2^32, as the sums it corrects
    corrections[0] = int32_t(bias * (format == kNvfp4 ? half[0] : half[0] + half[1]));
    corrections[1] = int32_t(bias * half[1]);
    if (format == kTcq2 && acts == kInt24) {              // int_blocks.h: sums of half the levels
      corrections[0] = int32_t(8 * (half[0] + half[1]));
      corrections[1] = int32_t(to_bits(float(int32_t(half[0] + half[1]))));
    }
    const uint8_t* place = format_bits(format) == 2 ? kPlaces.two_bits : kPlaces.e2m1;
    for (int d = 0; d < acts; ++d) {
      int8_t digits[32];
      int32_t any = 0;
      for (int k = 0; k < 32; ++k) {
        digits[k] = int8_t(q[k]);
        any |= digits[k];
        q[k] = (q[k] - digits[k]) >> 8;
      }
      for (int k = 0; k < 32; ++k) group[32 * d + place[k]] = uint8_t(digits[k]);
      if (acts == kInt24 && d == 0) group[kLowDigit] = any != 0;
    }
  }
  scale = (scale + poison) * weight_unit(format);
  std::memcpy(group + 32 * acts, &scale, 4);
  std::memcpy(group + 32 * acts + 4, corrections, 8);
}

void pack_token(int format, int acts, const float* x, int hidden, uint8_t* groups, int64_t group_stride) {
  int k = 0;
  for (; k + 32 <= hidden; k += 32, groups += group_stride) pack_group(format, acts, x + k, groups);
  for (; k < (hidden + 63) / 64 * 64; k += 32, groups += group_stride) {
    float padded[32] = {};
    for (int j = 0; j < 32 && k + j < hidden; ++j) padded[j] = x[k + j];
    pack_group(format, acts, padded, groups);
  }
}

void activate(const Activation& activation, const float* gate, const float* up, int count, float* out) {
  const float top = activation.limited ? activation.limit : std::numeric_limits<float>::infinity();
  if (activation.kind == kSwiglu) {
    for (int i = 0; i < count; ++i) {
      const float g = gate[i] > top ? top : gate[i];
      const float u = up[i] > top ? top : up[i] < -top ? -top : up[i];
      out[i] = g * sigmoid(g) * u;
    }
  } else {
    for (int i = 0; i < count; ++i) {
      const float g = gate[i] > top ? top : gate[i];
      const float u = up[i] > top ? top : up[i] < -top ? -top : up[i];
      out[i] = (u + 1.0f) * (g * sigmoid(activation.alpha * g));
    }
  }
}

}  // namespace moet
