// Arithmetic of small_grouped.cuh for fp8, fp8_row and bf16 rows: bf16 products (weights.cuh).
#pragma once
#include "mlp.cuh"

constexpr i32 kPairs = 8, kPitch = kPairs + 1;   // of an item, a tile; odd: lanes at one pair hit 32 banks

// The weights of a warp: a chunk in registers. It is 4 or 8 KiB: 16 warps have 66 KiB or more on their way to a multiprocessor.
struct LoadedChunk {
  Chunk half[2];
  bool there;

  DEVICE_MEMBER void ask(const u8* at, i64 stride, i32 blocks, i32 g, i32 t) {
#pragma unroll
    for (i32 i = 0; i < 2; ++i) load_chunk(half[i], at, blocks > 1 ? at + stride : at, i, g, t);   // one block: any weights, against zeros
    there = true;
  }
};

// The activations of an item's pairs: pair g's row, or null.
struct Inputs {
  const u16* row;
  i32 columns;
  DEVICE_MEMBER void open(const MlpArgs& a, bool gate_up, const i32* pairs, i32 position, i32 live, i32 g) {
    columns = gate_up ? a.hidden : 32 * a.tiles;
    row = g >= live ? nullptr : gate_up ? a.x + static_cast<i64>(pairs[position + g] / a.layer.top_k) * a.hidden : a.act + (position + g) * a.act_stride;
  }
  DEVICE_MEMBER void load(u32 (&to)[1][4][2], i32 chunk, i32 t) const { load_activations(row, chunk, columns, t, to[0]); }
};

// A lane's sums to where a group adds them up.
DEVICE void store_sums(float* to, const float (&sum)[2][2][1][4], i32 g, i32 t) {
#pragma unroll
  for (i32 half = 0; half < 2; ++half)
#pragma unroll
    for (i32 i = 0; i < 2; ++i)
#pragma unroll
      for (i32 q = 0; q < 4; ++q) to[(32 * half + 4 * g + 2 * i + q / 2) * kPitch + 2 * t + q % 2] = sum[half][i][0][q];
}

DEVICE void store_act(const MlpArgs& a, i32 position, i32 tile, float v) { a.act[position * a.act_stride + 32 * tile + thread_id() % 32] = to_bf16(v); }
