// The two GEMMs for many tokens an expert (prefill), with mma.sync: bound by the tensor cores. A block takes 4 strips, one a warp, and 64 pairs; activations go through
// shared memory, two chunks of 64 columns in turn; weights are decoded once for the 64 pairs.
#pragma once
#include "mlp.cuh"

constexpr i32 kBigWarps = 4, kBigTokens = kScaleAfter ? 32 : 64, kTiles = kBigTokens / 8;   // scales behind the product take registers: 32 pairs there
constexpr i32 kBigPitch = 64 + 4;   // bf16 of a row: lanes (g, t) then read 16 different pairs of banks
constexpr i32 kCarriers = 32 * kBigWarps / kBigTokens, kCarriedWords = 32 / kCarriers;   // threads that carry a row of a chunk, 4-byte words of each
struct Tile { u16 of[2][kBigTokens * kBigPitch]; };

// A thread's part of row `thread / kCarriers` of a chunk, on its way from device to shared memory.
struct Carried { u32 word[kCarriedWords]; };
DEVICE i32 carried_row() { return thread_id() / kCarriers; }
DEVICE void load_carried(Carried& c, const u16* row, i32 chunk, i32 columns) {
  const i32 column = 64 * chunk + 2 * kCarriedWords * (thread_id() % kCarriers);
#pragma unroll
  for (i32 i = 0; i < kCarriedWords; i += 2) {
    const bool there = row && column + 2 * i < columns;
    c.word[i] = there ? reinterpret_cast<const u32*>(row + column)[i] : 0;
    c.word[i + 1] = there ? reinterpret_cast<const u32*>(row + column)[i + 1] : 0;
  }
}
DEVICE void store_carried(const Carried& c, u16* tile) {
  u32* to = reinterpret_cast<u32*>(tile + carried_row() * kBigPitch) + kCarriedWords * (thread_id() % kCarriers);
#pragma unroll
  for (i32 i = 0; i < kCarriedWords; ++i) to[i] = c.word[i];
}

// sum[half][n][i][q]: rows 32 half + 4g + 2i + q / 2 of the warp's strip, tokens 8n + 2t + q % 2. `mine`: the warp has a strip.
DEVICE void multiply_strips(const Strip& strip, bool mine, const u16* row, i32 columns, Tile& tile, float (&sum)[2][kTiles][2][4]) {
  const i32 lane = thread_id() % 32, g = lane / 4, t = lane % 4, chunks = (strip.blocks + 1) / 2;
  Carried carried;
  Chunk chunk[2];
  load_carried(carried, row, 0, columns);
  if (mine)
    for (i32 half = 0; half < 2; ++half) load_chunk(chunk[half], block_of(strip, 0), block_of(strip, 1), half, g, t);
  for (i32 c = 0; c < chunks; ++c) {
    u16* here = tile.of[c & 1];
    store_carried(carried, here);
    sync_block();
    if (c + 1 < chunks) load_carried(carried, row, c + 1, columns);
    if (!mine) continue;
    const Chunk now[2] = {chunk[0], chunk[1]};
    if (c + 1 < chunks) {
#pragma unroll
      for (i32 half = 0; half < 2; ++half) load_chunk(chunk[half], block_of(strip, 2 * c + 2), block_of(strip, 2 * c + 3), half, g, t);
    }
#pragma unroll
    for (i32 block = 0; block < 2; ++block) {
      u32 a[4][2][4];   // fragment 2 * half + i, product
#pragma unroll
      for (i32 f = 0; f < 4; ++f) fragments(now[f >> 1], block, f & 1, a[f]);
#pragma unroll
      for (i32 n = 0; n < kTiles; ++n) {
        u32 b[2][2];
#pragma unroll
        for (i32 m = 0; m < 2; ++m) {
          const u32* p = reinterpret_cast<const u32*>(here + (8 * n + g) * kBigPitch + column_of(2 * block + m, t));
          b[m][0] = p[0];
          b[m][1] = p[1];
        }
#pragma unroll
        for (i32 f = 0; f < 4; ++f) {
          float part[4] = {};
          float (&to)[4] = sum[f >> 1][n][f & 1];
          mma_bf16(kScaleAfter ? part : to, a[f][0], b[0]);
          mma_bf16(kScaleAfter ? part : to, a[f][1], b[1]);
          if (kScaleAfter) {
#pragma unroll
            for (i32 q = 0; q < 4; ++q) to[q] = fused_multiply_add(part[q], now[f >> 1].after[block][2 * (f & 1) + (q >> 1)], to[q]);
          }
        }
      }
    }
  }
}

KERNEL(gate_up_large, MlpArgs, args, 128) {
  SHARED(Tile, tile);
  Plan& plan = *args.layer.plan;
  if (args.wave >= plan.waves) return;
  fetch_first(args);
  u64 waited = 0;
  const i32 warp = thread_id() / 32, g = thread_id() % 32 / 4, t = thread_id() % 4;
  Work work = start(plan, args.wave);
  while (draw(plan, &plan.item[0][args.wave], kBigTokens, (args.tiles + kBigWarps - 1) / kBigWarps, work)) {
    if (!readable(args, work.step, waited)) continue;
    const Step& step = plan.steps[work.step];
    const i32 position = step.pair_begin + work.token_tile * kBigTokens, count = step.pair_begin + step.pair_count - position;
    const i32 token = carried_row(), number = work.strip * kBigWarps + warp;
    const u16* x = token < count ? args.x + static_cast<i64>(plan.pairs[position + token] / args.layer.top_k) * args.hidden : nullptr;
    const u8* row = row_of(args, step);
    const bool mine = number < args.tiles;
    const Strip strip = w13_strip(args, row, mine ? number : 0);
    float sum[2][kTiles][2][4] = {};
    multiply_strips(strip, mine, x, args.hidden, tile, sum);
    if (!mine) continue;
#pragma unroll
    for (i32 n = 0; n < kTiles; ++n)
#pragma unroll
      for (i32 q = 0; q < 2; ++q) {
        const i32 pair = 8 * n + 2 * t + q;
        if (pair >= count) continue;
        u32 packed[2];
#pragma unroll
        for (i32 i = 0; i < 2; ++i) {
          float v[2];
#pragma unroll
          for (i32 r = 0; r < 2; ++r) {
            const i32 value = 4 * g + 2 * i + r;
            const float gate = fused_multiply_add(sum[0][n][i][2 * r + q], multiplier(args, row, 0), tile_bias(args, strip, 0, value));
            const float up = fused_multiply_add(sum[1][n][i][2 * r + q], multiplier(args, row, 1), tile_bias(args, strip, 1, value));
            v[r] = 32 * (args.tile_begin + number) + value < args.inter ? activate(args, gate, up) : 0.0f;
          }
          packed[i] = pack_bf16(v[0], v[1]);
        }
        u32* to = reinterpret_cast<u32*>(args.act + (position + pair) * args.act_stride + 32 * number + 4 * g);
        to[0] = packed[0];
        to[1] = packed[1];
      }
  }
  if (args.fetchers) count_stall(args.layer, args.wave, waited);
}

KERNEL(down_large, MlpArgs, args, 128) {
  SHARED(Tile, tile);
  Plan& plan = *args.layer.plan;
  if (args.wave >= plan.waves) return;
  const i32 warp = thread_id() / 32, g = thread_id() % 32 / 4, t = thread_id() % 4, strips = hidden_padded(args) / 64;
  Work work = start(plan, args.wave);
  while (draw(plan, &plan.item[1][args.wave], kBigTokens, (strips + kBigWarps - 1) / kBigWarps, work)) {
    const bool lost = row_failed(plan, work.step);
    const Step& step = plan.steps[work.step];
    const i32 position = step.pair_begin + work.token_tile * kBigTokens, count = step.pair_begin + step.pair_count - position;
    const i32 token = carried_row(), number = work.strip * kBigWarps + warp;
    const u8* row = row_of(args, step);
    const bool mine = number < strips;
    float sum[2][kTiles][2][4] = {};
    if (!lost)
      multiply_strips(w2_strip(args, row, mine ? number : 0), mine, token < count ? args.act + (position + token) * args.act_stride : nullptr, 32 * args.tiles, tile, sum);
    if (!mine) continue;
#pragma unroll
    for (i32 n = 0; n < kTiles; ++n)
#pragma unroll
      for (i32 q = 0; q < 2; ++q) {
        const i32 pair = 8 * n + 2 * t + q;
        if (pair >= count) continue;
        u16* to = args.y + static_cast<i64>(plan.pairs[position + pair]) * args.hidden;
#pragma unroll
        for (i32 half = 0; half < 2; ++half)
#pragma unroll
          for (i32 i = 0; i < 2; ++i) {
            const i32 column = 64 * number + 32 * half + 4 * g + 2 * i;   // hidden is even
            if (column >= args.hidden) continue;
            float v[2];
#pragma unroll
            for (i32 r = 0; r < 2; ++r)
              v[r] = lost ? 0.0f : fused_multiply_add(sum[half][n][i][2 * r + q], multiplier(args, row, 2), down_bias(args, row, column + r));
            *reinterpret_cast<u32*>(to + column) = pack_bf16(v[0], v[1]);
          }
      }
  }
}
