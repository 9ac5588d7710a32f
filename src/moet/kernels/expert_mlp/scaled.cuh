// The two GEMMs of a prefill with MXFP8 activations and block-scaled tensor cores (sm_120a; elsewhere emulated, for tests). As in large.cuh a block takes 4 strips,
// one a warp, and 64 pairs, and decodes weights once for the 64. Activations come as copies beside the products, 128 columns at a time in two buffers.
#pragma once
#include "epilogue.cuh"
#include "mxfp8.cuh"

constexpr i32 kScaledWarps = 4, kScaledTokens = 64, kScaledTiles = kScaledTokens / 8;
constexpr i32 kScaledBlocks = 4, kScaledPitch = 32 * kScaledBlocks + 32;   // bytes of a row: half a warp then reads 8 bytes at each of 16 different banks' pairs
struct ScaledStage {
  Vec4 codes[kScaledTokens * kScaledPitch / 16];
  u32 scales[kScaledTokens];
};
struct ScaledStages { ScaledStage of[2]; };

// Two threads a row. row: in `from`, negative: none, what is in the buffer does no harm, since a column of B reaches only its own column of D.
DEVICE void copy_scaled(ScaledStage& to, const Mxfp8& from, i64 row, i32 stage) {
  if (row < 0) return;
  const i32 here = thread_id() / 2, odd = thread_id() % 2;
  const u8* codes = from.codes + row * from.stride + 32 * kScaledBlocks * stage;
#pragma unroll
  for (i32 i = 0; i < kScaledBlocks; ++i) copy_async16(&to.codes[here * (kScaledPitch / 16) + 2 * i + odd], codes + 16 * (2 * i + odd));
  if (odd) copy_async4(&to.scales[here], from.scales + (row * from.stride / 32 + kScaledBlocks * stage));
}

// sum[half][n][i][q]: rows 32 half + 4g + 2i + q / 2 of the warp's strip, pairs 8n + 2t + q % 2. `mine`: the warp has a strip. count: of pairs.
DEVICE void multiply_scaled(const Strip& strip, bool mine, const Mxfp8& from, i64 row, i32 count, ScaledStages& stages, float (&sum)[2][kScaledTiles][2][4]) {
  const i32 lane = thread_id() % 32, g = lane / 4, t = lane % 4, last = (strip.blocks + kScaledBlocks - 1) / kScaledBlocks;
  copy_scaled(stages.of[0], from, row, 0);
  ScaledBlock next[2];
  if (mine)
#pragma unroll
    for (i32 half = 0; half < 2; ++half) load_scaled(next[half], strip.at, half, g, t);
  for (i32 s = 0; s < last; ++s) {
    copies_landed();
    sync_block();
    if (s + 1 < last) copy_scaled(stages.of[(s + 1) & 1], from, row, s + 1);
    if (!mine) continue;
    const ScaledStage& stage = stages.of[s & 1];
    const u8* codes = reinterpret_cast<const u8*>(stage.codes) + g * kScaledPitch + 8 * t;
    const u32 scales[2] = {stage.scales[8 * t + g], stage.scales[32 + 8 * t + g]};   // lane t has those of tiles t and 4 + t, for all four blocks
#pragma unroll
    for (i32 b = 0; b < kScaledBlocks; ++b) {
      const i32 k = kScaledBlocks * s + b;
      if (k >= strip.blocks) break;
      u32 a[4][4], inner[4];   // fragment 2 * half + i
      float after[2][4];
#pragma unroll
      for (i32 half = 0; half < 2; ++half) {
#pragma unroll
        for (i32 i = 0; i < 2; ++i) {
          scaled_fragment(next[half], i, t, a[2 * half + i]);
          inner[2 * half + i] = inner_scale(next[half], i, t);
        }
#pragma unroll
        for (i32 r = 0; r < 4; ++r) after[half][r] = outer_scale(next[half], r);
        load_scaled(next[half], block_of(strip, k + 1), half, g, t);
      }
#pragma unroll
      for (i32 n = 0; n < kScaledTiles; ++n) {
        if (n == kScaledTiles / 2 && count <= 8 * n) break;
        const Vec2 pair = *reinterpret_cast<const Vec2*>(codes + 8 * n * kScaledPitch + 32 * b);
        const u32 column[2] = {pair.x, pair.y};
#pragma unroll
        for (i32 f = 0; f < 4; ++f) {
          float part[4] = {};
          float (&to)[4] = sum[f >> 1][n][f & 1];
          mma_block_scaled(kScaleOfBlocks ? part : to, a[f], column, inner[f], 0, scales[n >> 2], b, n & 3);
          if (kScaleOfBlocks) {
#pragma unroll
            for (i32 q = 0; q < 4; ++q) to[q] = fused_multiply_add(part[q], after[f >> 1][2 * (f & 1) + (q >> 1)], to[q]);
          }
        }
      }
    }
  }
  if (kFormat != kFp8Row || !mine) return;
#pragma unroll
  for (i32 half = 0; half < 2; ++half) {
    const Vec4 scales = load_vector(strip.at, kCodeBytes + (32 * half + 4 * g) * 4);   // every block has them
#pragma unroll
    for (i32 n = 0; n < kScaledTiles; ++n)
#pragma unroll
      for (i32 e = 0; e < 8; ++e) sum[half][n][e >> 2][e & 3] = multiply(sum[half][n][e >> 2][e & 3], as_float(word_of(scales, e >> 1)));
  }
}

KERNEL(gate_up_scaled, MlpArgs, args, 128) {
  SHARED(ScaledStages, stages);
  Plan& plan = *args.layer.plan;
  if (args.wave >= plan.waves) return;
  fetch_first(args);
  u64 waited = 0;
  const Mxfp8 x = x_mxfp8(args), act = act_mxfp8(args);
  const i32 warp = thread_id() / 32, g = thread_id() % 32 / 4, t = thread_id() % 4;
  Work work = start(plan, args.wave);
  while (draw(plan, &plan.item[0][args.wave], kScaledTokens, args.many, (args.tiles + kScaledWarps - 1) / kScaledWarps, work)) {
    if (!readable(args, work.step, waited)) continue;
    const Step& step = plan.steps[work.step];
    const i32 position = step.pair_begin + work.token_tile * kScaledTokens, count = step.pair_begin + step.pair_count - position;
    const i32 pair = thread_id() / 2, number = work.strip * kScaledWarps + warp;
    const u8* row = row_of(args, step);
    const bool mine = number < args.tiles;
    const Strip strip = w13_strip(args, row, mine ? number : 0);
    float sum[2][kScaledTiles][2][4] = {};
    multiply_scaled(strip, mine, x, pair < count ? plan.pairs[position + pair] / args.layer.top_k : -1, count, stages, sum);
    if (!mine) continue;
    // A tile's 32 values of a pair are a block of its activations; lanes g have four each.
    const TileTerms terms = tile_terms(args, row, strip, number, g);
#pragma unroll
    for (i32 n = 0; n < kScaledTiles; ++n) {
      if (8 * n >= count) break;
#pragma unroll
      for (i32 q = 0; q < 2; ++q) {
        float v[4];
        middle_values<kScaledTiles>(args, terms, sum, n, q, v);
        const u32 most = largest_bits<4>(v);
        const i32 here = 8 * n + 2 * t + q;
        if (here < count) store_mxfp8(act, position + here, number, g, v, most);
      }
    }
  }
  if (args.fetchers) count_stall(args.layer, args.wave, waited);
}

KERNEL(down_scaled, MlpArgs, args, 128) {
  SHARED(ScaledStages, stages);
  Plan& plan = *args.layer.plan;
  if (args.wave >= plan.waves) return;
  const Mxfp8 act = act_mxfp8(args);
  const i32 warp = thread_id() / 32, strips = hidden_padded(args) / 64;
  Work work = start(plan, args.wave);
  while (draw(plan, &plan.item[1][args.wave], kScaledTokens, args.many, (strips + kScaledWarps - 1) / kScaledWarps, work)) {
    const bool lost = row_failed(plan, work.step);
    const Step& step = plan.steps[work.step];
    const i32 position = step.pair_begin + work.token_tile * kScaledTokens, count = step.pair_begin + step.pair_count - position;
    const i32 pair = thread_id() / 2, number = work.strip * kScaledWarps + warp;
    const u8* row = row_of(args, step);
    const bool mine = number < strips;
    float sum[2][kScaledTiles][2][4] = {};
    if (!lost) multiply_scaled(w2_strip(args, row, mine ? number : 0), mine, act, pair < count ? position + pair : -1, count, stages, sum);
    if (mine) store_answers<kScaledTiles>(args, row, lost, number, position, count, sum);
  }
}
