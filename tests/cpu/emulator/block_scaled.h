// The names of kernels/gpu/block_scaled.cuh: the instruction where MOET_ARCH is 120, else what older architectures have, so that both ways run. Sums are float64 and rounded once, so that what a test sees is the kernel's own error.
#pragma once
#include "copies.h"

DEVICE double emulated_e4m3(u32 code) {
  const int exponent = code >> 3 & 15, mantissa = code & 7;
  if ((code & 127) == 127) return NAN;
  const double magnitude = exponent ? std::ldexp(8 + mantissa, exponent - 10) : std::ldexp(mantissa, -9);
  return code & 128 ? -magnitude : magnitude;
}
DEVICE u32 emulated_e4m3_code(float v) {
  if (std::isnan(v)) return 0x7f;
  const u32 sign = as_bits(v) >> 24 & 128;
  const double magnitude = std::fabs(static_cast<double>(v));
  if (magnitude >= 448) return sign | 0x7e;
  const int exponent = magnitude < 0x1p-6 ? -6 : std::ilogb(magnitude);
  const int steps = static_cast<int>(std::nearbyint(std::ldexp(magnitude, 3 - exponent)));   // 0 .. 16, eighths of 2^exponent; the default rounding, to even
  return sign | static_cast<u32>(steps + 8 * (exponent + 6));   // 16 eighths carry into the exponent by themselves; below 8 of them it is 0
}
DEVICE u32 pack_e4m3(float low, float high) { return emulated_e4m3_code(high) << 8 | emulated_e4m3_code(low); }

struct ScaledOperands {
  const u32 *a, *b;
  float* d;
  u32 scale_a, scale_b;   // the byte that the selectors name
  i32 lane_b;
};
DEVICE void emulated_mma_block_scaled(const ScaledOperands* const (&of)[32]) {
  double a[16][32], b[8][32];
  i32 row_scale[16], column_scale[8];
  for (i32 lane = 0; lane < 32; ++lane) {
    const i32 g = lane / 4, t = lane % 4;
    for (i32 j = 0; j < 4; ++j)
      for (i32 half = 0; half < 2; ++half) {
        const i32 k = 16 * half + 4 * t + j;
        for (i32 i = 0; i < 2; ++i) a[g + 8 * i][k] = emulated_e4m3(of[lane]->a[2 * half + i] >> (8 * j) & 255);
        b[g][k] = emulated_e4m3(of[lane]->b[half] >> (8 * j) & 255);
      }
    if (t < 2) row_scale[g + 8 * t] = static_cast<i32>(of[lane]->scale_a);
    if (t == of[lane]->lane_b) column_scale[g] = static_cast<i32>(of[lane]->scale_b);
  }
  for (i32 lane = 0; lane < 32; ++lane)
    for (i32 q = 0; q < 4; ++q) {
      const i32 row = lane / 4 + 8 * (q >> 1), column = 2 * (lane % 4) + (q & 1);
      double sum = 0;
      for (i32 k = 0; k < 32; ++k) sum += a[row][k] * b[column][k];
      if (row_scale[row] == 255 || column_scale[column] == 255) sum = NAN;
      float& d = of[lane]->d[q];
      d = static_cast<float>(d + std::ldexp(sum, row_scale[row] + column_scale[column] - 254));
    }
}
DEVICE void emulated_meeting(const ScaledOperands& mine) {
  emulator::machine.meet(
      emulator::Meeting::kMma, [&](auto& w, u32 at, i32 lane) { w.value[at][lane] = reinterpret_cast<u64>(&mine); },
      [](auto& w, u32 at) {
        const ScaledOperands* of[32];
        for (i32 lane = 0; lane < 32; ++lane) of[lane] = reinterpret_cast<const ScaledOperands*>(w.value[at][lane]);
        emulated_mma_block_scaled(of);
      });
}
#if MOET_ARCH >= 120
#define MOET_BLOCK_SCALED
DEVICE void mma_block_scaled(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2], u32 scale_a, i32 byte_a, u32 scale_b, i32 byte_b, i32 lane_b) {
  emulated_meeting({a, b, d, scale_a >> (8 * byte_a) & 255, scale_b >> (8 * byte_b) & 255, lane_b});
}
#else
DEVICE void mma_e4m3(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
  d[0] = d[1] = d[2] = d[3] = 0.0f;
  emulated_meeting({a, b, d, 127, 127, 0});
}
#endif
