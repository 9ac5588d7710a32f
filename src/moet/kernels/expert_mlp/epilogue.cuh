// What is done with the sums of the GEMMs for many tokens: a warp has 64 rows x kTiles * 8 pairs of them, sum[half][n][i][q] of row 32 half + 4g + 2i + q / 2 of
// its strip and pair 8n + 2t + q % 2 of its tile, with g = lane / 4, t = lane % 4.
#pragma once
#include "mlp.cuh"

// What a lane's four values of a w13 tile need besides the sums. Read once for all pairs: between stores, a compiler has to read it again.
struct TileTerms {
  float gate, up, gate_bias[4], up_bias[4];
  i32 there;   // values 4g .. 4g + 3 that are no padding
};
DEVICE TileTerms tile_terms(const MlpArgs& a, const u8* row, const Strip& strip, i32 tile, i32 g) {
  TileTerms of = {multiplier(a, row, 0), multiplier(a, row, 1), {}, {}, a.inter - 32 * (a.tile_begin + tile) - 4 * g};
#pragma unroll
  for (i32 e = 0; e < 4; ++e) of.gate_bias[e] = tile_bias(a, strip, 0, 4 * g + e), of.up_bias[e] = tile_bias(a, strip, 1, 4 * g + e);
  return of;
}
// Values 4g .. 4g + 3 of pair 8n + 2t + q.
template <i32 kTiles> DEVICE void middle_values(const MlpArgs& a, const TileTerms& of, const float (&sum)[2][kTiles][2][4], i32 n, i32 q, float (&v)[4]) {
#pragma unroll
  for (i32 e = 0; e < 4; ++e) {
    const float gate = fused_multiply_add(sum[0][n][e >> 1][2 * (e & 1) + q], of.gate, of.gate_bias[e]);
    const float up = fused_multiply_add(sum[1][n][e >> 1][2 * (e & 1) + q], of.up, of.up_bias[e]);
    v[e] = e < of.there ? activate(a, gate, up) : 0.0f;
  }
}

// down's answers for strip `number` of the hidden columns. lost: the row could not be read, the answers are zeros.
template <i32 kTiles>
DEVICE void store_answers(const MlpArgs& a, const u8* row, bool lost, i32 number, i32 position, i32 count, const float (&sum)[2][kTiles][2][4]) {
  const i32 g = thread_id() % 32 / 4, t = thread_id() % 4, first = 64 * number + 4 * g;
  const float factor = lost ? 0.0f : multiplier(a, row, 2);
  float bias[2][4];
#pragma unroll
  for (i32 half = 0; half < 2; ++half)
#pragma unroll
    for (i32 e = 0; e < 4; ++e) bias[half][e] = !lost && first + 32 * half < a.hidden ? down_bias(a, row, first + 32 * half + e) : 0.0f;
#pragma unroll
  for (i32 n = 0; n < kTiles; ++n)
#pragma unroll
    for (i32 q = 0; q < 2; ++q) {
      const i32 pair = 8 * n + 2 * t + q;
      if (pair >= count) continue;
      u16* to = a.y + static_cast<i64>(a.layer.plan->pairs[position + pair]) * a.hidden + first;
#pragma unroll
      for (i32 half = 0; half < 2; ++half) {
        if (first + 32 * half >= a.hidden) continue;   // hidden is a multiple of 8
        float v[4];
#pragma unroll
        for (i32 e = 0; e < 4; ++e) v[e] = fused_multiply_add(sum[half][n][e >> 1][2 * (e & 1) + q], factor, bias[half][e]);
        *reinterpret_cast<Vec2*>(to + 32 * half) = {pack_bf16(v[0], v[1]), pack_bf16(v[2], v[3])};
      }
    }
}
