// The two GEMMs for few tokens an expert (decoding): bound by reading the weights. A block takes a strip and up to 8 pairs; its 8 warps split K, and their
// sums are added in the order of the warps.
#pragma once
#include "mlp.cuh"

constexpr i32 kWarps = 8, kTokens = 8, kPitch = kTokens + 1;   // pitch: so that 32 lanes at one token hit 32 banks
constexpr i32 kAhead = kBits == 2 ? 4 : kBits == 4 ? 2 : 1;    // chunks in flight: 8 loads of 16 bytes a lane
struct Sums { float of[kWarps][64 * kPitch]; };

// Sums of a strip for the 8 rows of activations that lanes name by g: into shared memory, one part a warp.
DEVICE void multiply_strip(const Strip& strip, const u16* row, i32 columns, Sums& sums) {
  const i32 warp = thread_id() / 32, lane = thread_id() % 32, g = lane / 4, t = lane % 4;
  const i32 chunks = (strip.blocks + 1) / 2;
  float sum[2][2][4] = {};
  for (i32 c = warp; c < chunks; c += kWarps * kAhead) {
    Chunk chunk[kAhead][2];
    u32 b[kAhead][4][2];
#pragma unroll
    for (i32 i = 0; i < kAhead; ++i) {
      const i32 k = c + i * kWarps;
#pragma unroll
      for (i32 half = 0; half < 2; ++half) load_chunk(chunk[i][half], block_of(strip, 2 * k), block_of(strip, 2 * k + 1), half, g, t);
    }
#pragma unroll
    for (i32 i = 0; i < kAhead; ++i) load_activations(row, c + i * kWarps, columns, t, b[i]);
#pragma unroll
    for (i32 i = 0; i < kAhead; ++i)
#pragma unroll
      for (i32 half = 0; half < 2; ++half) accumulate(chunk[i][half], b[i], sum[half]);
  }
#pragma unroll
  for (i32 half = 0; half < 2; ++half)
#pragma unroll
    for (i32 i = 0; i < 2; ++i)
#pragma unroll
      for (i32 q = 0; q < 4; ++q) sums.of[warp][(32 * half + 4 * g + 2 * i + (q >> 1)) * kPitch + 2 * t + (q & 1)] = sum[half][i][q];
  sync_block();
}
DEVICE float total(const Sums& sums, i32 row, i32 token) {
  float v = 0.0f;
#pragma unroll
  for (i32 w = 0; w < kWarps; ++w) v = add(v, sums.of[w][row * kPitch + token]);
  return v;
}

KERNEL(gate_up_small, MlpArgs, args, 256) {
  SHARED(Sums, sums);
  Plan& plan = *args.layer.plan;
  if (args.wave >= plan.waves) return;
  fetch_first(args);
  u64 waited = 0;
  const i32 g = thread_id() % 32 / 4;
  Work work = start(plan, args.wave);
  while (draw(plan, &plan.item[0][args.wave], kTokens, args.tiles, work)) {
    const Step& step = plan.steps[work.step];
    if (!readable(args, work.step, waited)) continue;
    const i32 position = step.pair_begin + work.token_tile * kTokens, count = step.pair_begin + step.pair_count - position;
    const u16* x = g < count ? args.x + static_cast<i64>(plan.pairs[position + g] / args.layer.top_k) * args.hidden : nullptr;
    const u8* row = row_of(args, step);
    const Strip strip = w13_strip(args, row, work.strip);
    multiply_strip(strip, x, args.hidden, sums);
    const i32 token = thread_id() / 32, value = thread_id() % 32;
    if (token < count) {
      const float gate = fused_multiply_add(total(sums, value, token), multiplier(args, row, 0), tile_bias(args, strip, 0, value));
      const float up = fused_multiply_add(total(sums, 32 + value, token), multiplier(args, row, 1), tile_bias(args, strip, 1, value));
      const bool there = 32 * (args.tile_begin + work.strip) + value < args.inter;
      args.act[(position + token) * args.act_stride + 32 * work.strip + value] = there ? to_bf16(activate(args, gate, up)) : 0;
    }
  }
  if (args.fetchers) count_stall(args.layer, args.wave, waited);
}

KERNEL(down_small, MlpArgs, args, 256) {
  SHARED(Sums, sums);
  Plan& plan = *args.layer.plan;
  if (args.wave >= plan.waves) return;
  const i32 g = thread_id() % 32 / 4;
  Work work = start(plan, args.wave);
  while (draw(plan, &plan.item[1][args.wave], kTokens, hidden_padded(args) / 64, work)) {
    const Step& step = plan.steps[work.step];
    const bool lost = row_failed(plan, work.step);
    const i32 position = step.pair_begin + work.token_tile * kTokens, count = step.pair_begin + step.pair_count - position;
    const u8* row = row_of(args, step);
    if (!lost) multiply_strip(w2_strip(args, row, work.strip), g < count ? args.act + (position + g) * args.act_stride : nullptr, 32 * args.tiles, sums);
    for (i32 i = thread_id(); i < 64 * kTokens; i += 32 * kWarps) {
      const i32 token = i / 64, n = i % 64, column = 64 * work.strip + n;
      if (token >= count || column >= args.hidden) continue;
      const float v = lost ? 0.0f : fused_multiply_add(total(sums, n, token), multiplier(args, row, 2), down_bias(args, row, column));
      args.y[static_cast<i64>(plan.pairs[position + token]) * args.hidden + column] = to_bf16(v);
    }
  }
}
