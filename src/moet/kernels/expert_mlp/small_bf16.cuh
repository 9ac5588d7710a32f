// Arithmetic of small.cuh for fp8, fp8_row and bf16 rows: bf16 products (weights.cuh).
#pragma once
#include "mlp.cuh"

constexpr i32 kTilePairs = 8, kValues = 4;
constexpr float kAfter = 1.0f;
constexpr i32 kAhead = 1;                         // a chunk is 4 or 8 KiB; 16 warps have 66 KiB or more on their way
constexpr bool kTable = false;
constexpr i32 kTableBytes = 0;
DEVICE void fill_table(u8*) {}

using Weights = Chunk[2];
// at: the chunk's first block, alike in all lanes; stride: from it to the second one.
DEVICE void load_weights(Weights& w, const u8* at, u32 stride, i32 g, i32 t) {
#pragma unroll
  for (i32 half = 0; half < 2; ++half) load_chunk(w[half], at, at + stride, half, g, t);
}

template <i32 kN> struct Inputs {
  const u16* row[kN];
  i32 columns;
  DEVICE_MEMBER void open(const MlpArgs& a, bool gate_up, const i32* pairs, i32 position, i32 live, i32 g, i32) {
    columns = gate_up ? a.hidden : 32 * a.tiles;
#pragma unroll
    for (i32 n = 0; n < kN; ++n) {
      const i32 own = 8 * n + g;
      row[n] = own >= live ? nullptr : gate_up ? a.x + static_cast<i64>(pairs[position + own] / a.layer.top_k) * a.hidden : a.act + (position + own) * a.act_stride;
    }
  }
};
template <i32 kN> DEVICE void multiply_weights(const Weights& w, const Inputs<kN>& in, i32 chunk, i32, i32 t, float (&sum)[2][2][kN][kValues]) {
  u32 b[kN][4][2];
#pragma unroll
  for (i32 n = 0; n < kN; ++n) load_activations(in.row[n], chunk, in.columns, t, b[n]);
#pragma unroll
  for (i32 half = 0; half < 2; ++half) accumulate<kN>(w[half], b, sum[half]);
}

DEVICE bool broken_input(const MlpArgs&, bool, i32, i32) { return false; }   // bf16 carries what is not finite
DEVICE void store_act(const MlpArgs& a, i32 position, i32 tile, float v) { a.act[position * a.act_stride + 32 * tile + thread_id() % 32] = to_bf16(v); }
