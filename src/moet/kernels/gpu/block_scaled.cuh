// OCP MX on tensor cores: E4M3 codes, and one power of two (UE8M0) for 32 of them along K. sm_120a has an instruction for it (PTX ISA, "Block Scaling for
// mma.sync"). sm_89 and later compute the same from E4M3 products and four shuffles: that is for tests of what goes into the instruction, not for speed. Older
// GPUs have no E4M3.
#pragma once
#include "copies.cuh"

#ifndef MOET_EMULATOR
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 890
#error "block-scaled kernels: expected sm_89 or newer, which have E4M3"
#endif

// E4M3 codes of two values, `low` in the low byte of 16 bits: rounded to nearest even, at most 448, NaN 0x7f.
DEVICE u32 pack_e4m3(float low, float high) {
  u16 v;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(v) : "f"(high), "f"(low));
  return v;
}

#if defined(__CUDA_ARCH_FEAT_SM120_ALL) || defined(__CUDA_ARCH_FEAT_SM121_ALL)
#define MOET_BLOCK_SCALED
DEVICE void mma_block_scaled(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2], u32 scale_a, i32 byte_a, u32 scale_b, i32 byte_b, i32 lane_b) {
  asm volatile("mma.sync.aligned.kind::mxf8f6f4.block_scale.scale_vec::1X.m16n8k32.row.col.f32.e4m3.e4m3.f32.ue8m0 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3}, "
               "{%10}, {%11,0}, {%12}, {%13,%14};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(scale_a), "h"(static_cast<u16>(byte_a)), "r"(scale_b),
                 "h"(static_cast<u16>(byte_b)), "h"(static_cast<u16>(lane_b)));
}
#else
// D = A x B, fragments as below.
DEVICE void mma_e4m3(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
  asm volatile("mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%10,%10,%10};"
               : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "f"(0.0f));
}
#endif
#endif

// D = (A * 2^row) x (B * 2^column) + D. A: E4M3 16 x 32, B: 32 x 8, D: float32 16 x 8; with g = lane / 4, t = lane % 4 (PTX ISA, "m16n8k32"):
//   a[0], a[2]: row g, columns 4t .. 4t+3 and 16+4t ..; a[1], a[3]: row g+8.  b[0], b[1]: column g, rows 4t .. and 16+4t ..
//   scale of A's row g: byte byte_a of lane 4g's scale_a; of row g+8: of lane 4g+1's.  Of B's column g: byte byte_b of lane (4g + lane_b)'s scale_b.
// byte_a, byte_b, lane_b (0 .. 3) are constants once loops are unrolled.
#ifndef MOET_BLOCK_SCALED
DEVICE float power_of_two(i32 exponent) { return as_float(exponent > -127 ? static_cast<u32>(exponent + 127) << 23 : 0x400000u); }   // -127 .. 127
// The product of two UE8M0, in halves: 2^-254 and 2^254 are no float32.
DEVICE float scaled(float v, u32 a, u32 b) {
  if (a == 255 || b == 255) return as_float(0x7fffffffu);
  const i32 exponent = static_cast<i32>(a + b) - 254, half = exponent >> 1;
  return multiply(multiply(v, power_of_two(half)), power_of_two(exponent - half));
}
DEVICE void mma_block_scaled(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2], u32 scale_a, i32 byte_a, u32 scale_b, i32 byte_b, i32 lane_b) {
  const i32 lane = thread_id() % 32, g = lane / 4, t = lane % 4;
  float part[4];
  mma_e4m3(part, a, b);
  u32 of_row[2], of_column[2];
#pragma unroll
  for (i32 i = 0; i < 2; ++i) {
    of_row[i] = shuffle(scale_a, 4 * g + i) >> (8 * byte_a) & 255;
    of_column[i] = shuffle(scale_b, 4 * (2 * t + i) + lane_b) >> (8 * byte_b) & 255;
  }
#pragma unroll
  for (i32 q = 0; q < 4; ++q) d[q] = add(d[q], scaled(part[q], of_row[q >> 1], of_column[q & 1]));
}
#endif
