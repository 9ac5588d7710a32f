// Small kernels that test_expert_mlp_scaled.py runs, in the emulator and, from tests/gpu, on a GPU.
#pragma once
#include "../../../src/moet/kernels/gpu/block_scaled.cuh"

struct ScaledProbe {
  const u32 *a, *b;                 // A, 16 rows of 8 words; B transposed, 8 columns of 8 words
  const u32 *scale_a, *scale_b;     // [32]: each lane's words
  float* d;                         // [4 byte_a][4 byte_b][4 lane_b][16][8]
};

KERNEL(probe_block_scaled, ScaledProbe, args, 32) {
  const i32 lane = thread_id(), g = lane / 4, t = lane % 4;
  const u32 a[4] = {args.a[g * 8 + t], args.a[(g + 8) * 8 + t], args.a[g * 8 + 4 + t], args.a[(g + 8) * 8 + 4 + t]};
  const u32 b[2] = {args.b[g * 8 + t], args.b[g * 8 + 4 + t]};
#pragma unroll
  for (i32 i = 0; i < 64; ++i) {
    float d[4];
    float* at = args.d + 128 * i + g * 8 + 2 * t;
#pragma unroll
    for (i32 q = 0; q < 4; ++q) d[q] = at[64 * (q >> 1) + (q & 1)];
    mma_block_scaled(d, a, b, args.scale_a[lane], i >> 4, args.scale_b[lane], i >> 2 & 3, i & 3);
#pragma unroll
    for (i32 q = 0; q < 4; ++q) at[64 * (q >> 1) + (q & 1)] = d[q];
  }
}

struct PackProbe {
  const float* values;
  u16* codes;                       // of each two values
  i64 pairs;
};
KERNEL(probe_pack_e4m3, PackProbe, args, 256) {
  for (i64 i = thread_id(); i < args.pairs; i += thread_count()) args.codes[i] = static_cast<u16>(pack_e4m3(args.values[2 * i], args.values[2 * i + 1]));
}
