// The two GEMMs for many tokens an expert (prefill), with mma.sync. A block takes 4 strips, one a warp, and 64 pairs; weights are decoded once for the 64, half a
// strip at a time. Activations lie arranged (columns.cuh) and come as copies beside the products, three chunks of 64 columns ahead.
#pragma once
#include "../gpu/copies.cuh"
#include "columns.cuh"
#include "epilogue.cuh"

namespace mma {
constexpr i32 kWarps = 4, kPairs = 64, kTiles = kPairs / 8, kStages = 4;
struct Stages {
  Vec4 of[kStages][kPairs * 8];
  Constants constant;
};   // of a row 128 bytes: unit u of row r lies at u ^ (r & 7), so that eight rows' units are in different banks

// Half a strip's rows of a chunk: lane (g, t) has rows 4g .. 4g + 3 of the 32.
struct Half {
  Vec4 words[kWords];
  u32 scales;        // of four rows; FP8: a float32
};
DEVICE void load_half(Half& h, const Strip& strip, i32 chunk, i32 half, i32 g, i32 t) {
  const u8* block = block_of(strip, 2 * chunk + (t >> 1));
  const i32 row = 32 * half + 4 * g;
#pragma unroll
  for (i32 i = 0; i < kWords; ++i) h.words[i] = load_words(block + ((kWords * (t & 1) + i) * 64 + row) * 4);
  if (kBits <= 4) h.scales = load_word(block + kCodeBytes + (kFormat == kNvfp4 ? (t & 1) * 64 : 0) + row);
  if (kFormat == kFp8) h.scales = load_word(block + kCodeBytes + 4 * half);
}
// a[i][m]: rows 4g + 2i and 4g + 2i + 1, product m of the chunk's four.
DEVICE void decode_half(const Half& h, const Constants& constant, u32 (&a)[2][4][4]) {
#pragma unroll
  for (i32 e = 0; e < 4; ++e) {
    Sixteen s;
    u32 pair[8];
#pragma unroll
    for (i32 i = 0; i < kWords; ++i) s.word[i] = word_of(h.words[i], e);
    s.scale = kFormat == kFp8 ? h.scales : h.scales >> (8 * e) & 255;
    decode_sixteen(s, constant, pair);
#pragma unroll
    for (i32 r = 0; r < 8; ++r) a[e >> 1][r >> 1][2 * (r & 1) + (e & 1)] = pair[r];
  }
}

// Two threads a row; past the pairs, what is in a stage does no harm.
DEVICE void copy_chunk(Stages& stages, const u8* row, i32 chunk) {
  if (!row) return;
  const i32 here = thread_id() / 2, first = thread_id() % 2 * 4;
#pragma unroll
  for (i32 u = 0; u < 4; ++u) copy_async16(&stages.of[chunk % kStages][here * 8 + ((first + u) ^ (here & 7))], row + chunk * 128 + 16 * (first + u));
}

// sum[half][n][i][q] as epilogue.cuh has it. row: the activations of pair thread / 2, or null; `mine`: the warp has a strip.
DEVICE void multiply(const Strip& strip, bool mine, const u8* row, i32 count, Stages& stages, float (&sum)[2][kTiles][2][4]) {
  const i32 lane = thread_id() % 32, g = lane / 4, t = lane % 4, chunks = (strip.blocks + 1) / 2;
#pragma unroll
  for (i32 c = 0; c < kStages - 1; ++c) {
    if (c < chunks) copy_chunk(stages, row, c);
    commit_copies();
  }
  const Constants constant = stages.constant;
  Half next;
  if (mine) load_half(next, strip, 0, 0, g, t);
  for (i32 c = 0; c < chunks; ++c) {
    wait_copies<kStages - 2>();
    sync_block();
    if (c + kStages - 1 < chunks) copy_chunk(stages, row, c + kStages - 1);
    commit_copies();
    if (!mine) continue;
    const Vec4* units = stages.of[c % kStages] + lane % 8 * 8;
#pragma unroll
    for (i32 half = 0; half < 2; ++half) {
      u32 a[2][4][4];
      decode_half(next, constant, a);
      if (!half || c + 1 < chunks) load_half(next, strip, c + half, !half, g, t);
#pragma unroll
      for (i32 n = 0; n < kTiles; ++n) {
        if (8 * n >= count) break;
        u32 b[8];
#pragma unroll
        for (i32 i = 0; i < 2; ++i) load_matrices(b + 4 * i, units + 64 * n + ((4 * i + lane / 8) ^ (lane % 8)));
#pragma unroll
        for (i32 m = 0; m < 4; ++m)
#pragma unroll
          for (i32 i = 0; i < 2; ++i) mma_bf16(sum[half][n][i], a[i][m], {b[2 * m], b[2 * m + 1]});
      }
    }
  }
  copies_landed();
  // What the sums are short of: a unit, FP8's scale of a row.
#pragma unroll
  for (i32 half = 0; half < 2; ++half)
#pragma unroll
    for (i32 e = 0; e < 4; ++e) {
      const float factor = kFormat == kFp8Row ? load_float(strip.at + kCodeBytes + (32 * half + 4 * g + e) * 4) : kUnit;
#pragma unroll
      for (i32 n = 0; n < kTiles; ++n)
#pragma unroll
        for (i32 q = 0; q < 2; ++q)
          if (factor != 1.0f) sum[half][n][e >> 1][2 * (e & 1) + q] = ::multiply(sum[half][n][e >> 1][2 * (e & 1) + q], factor);
    }
}

// Values 4g .. 4g + 3 of tile `number` for pairs 8n + 2t and the one after it, v[q][e]: arranged.
DEVICE void store_arranged(const MlpArgs& a, i32 position, i32 count, i32 number, i32 n, const float (&v)[2][4]) {
  const i32 g = thread_id() % 32 / 4, t = thread_id() % 4, column = 32 * (number & 1) + 4 * g;
  u16* to = a.act + (position + 8 * n + 2 * t) * a.act_stride + number / 2 * 64;
  const i32 left = count - 8 * n - 2 * t;
  if constexpr (kApart == 4) {   // a value's partner is in lane g ^ 1: one of them stores both of the first pair, the other one those of the second
    const i32 second = g & 1;
#pragma unroll
    for (i32 e = 0; e < 4; ++e) {
      const u32 mine = pack_bf16(v[0][e], v[1][e]), other = shuffle_xor(mine, 4);
      if (second < left) *reinterpret_cast<u32*>(to + second * a.act_stride + place_of(column + e)) = second ? permute_bytes(other, mine, 0x7632) : permute_bytes(mine, other, 0x5410);
    }
  } else {
#pragma unroll
    for (i32 q = 0; q < 2; ++q)
#pragma unroll
      for (i32 i = 0; i < 2; ++i) {
        const i32 e = kApart == 1 ? 2 * i : i;
        if (q < left) *reinterpret_cast<u32*>(to + q * a.act_stride + place_of(column + e)) = pack_bf16(v[q][e], v[q][e + kApart]);
      }
  }
}
}  // namespace mma

KERNEL(gate_up_large, MlpArgs, args, 128) {
  SHARED(mma::Stages, stages);
  let_next_launch_begin();   // small.cuh, beside
  Plan& plan = *args.layer.plan;
  if (args.wave >= plan.waves) return;
  fetch_first(args);
  u64 waited = 0;
  const i32 warp = thread_id() / 32, g = thread_id() % 32 / 4;
  if (thread_id() == 0) stages.constant = constants();
  Work work = start(plan, args.wave);
  while (draw(plan, &plan.item[0][args.wave], mma::kPairs, args.many, (args.tiles + mma::kWarps - 1) / mma::kWarps, work)) {
    if (!readable(args, work.step, waited)) continue;
    const Step& step = plan.steps[work.step];
    const i32 position = step.pair_begin + work.token_tile * mma::kPairs, count = step.pair_begin + step.pair_count - position;
    const i32 pair = thread_id() / 2, number = work.strip * mma::kWarps + warp;
    const u8* x = pair < count ? args.x_large + static_cast<i64>(plan.pairs[position + pair] / args.layer.top_k) * hidden_padded(args) * 2 : nullptr;
    const u8* row = row_of(args, step);
    const bool mine = number < args.tiles;
    const Strip strip = w13_strip(args, row, mine ? number : 0);
    float sum[2][mma::kTiles][2][4] = {};
    mma::multiply(strip, mine, x, count, stages, sum);
    if (32 * number >= args.act_stride) continue;   // zeros up to there
    const TileTerms terms = tile_terms(args, row, strip, number, g);
#pragma unroll
    for (i32 n = 0; n < mma::kTiles; ++n) {
      if (8 * n >= count) break;
      float v[2][4] = {};
#pragma unroll
      for (i32 q = 0; q < 2; ++q)
        if (mine) middle_values<mma::kTiles>(args, terms, sum, n, q, v[q]);
      mma::store_arranged(args, position, count, number, n, v);
    }
  }
  if (args.fetchers) count_stall(args.layer, args.wave, waited);
}

KERNEL(down_large, MlpArgs, args, 128) {
  SHARED(mma::Stages, stages);
  Plan& plan = *args.layer.plan;
  if (args.wave >= plan.waves) return;
  const i32 warp = thread_id() / 32, strips = hidden_padded(args) / 64;
  if (thread_id() == 0) stages.constant = constants();
  Work work = start(plan, args.wave);
  while (draw(plan, &plan.item[1][args.wave], mma::kPairs, args.many, (strips + mma::kWarps - 1) / mma::kWarps, work)) {
    const bool lost = row_failed(plan, work.step);
    const Step& step = plan.steps[work.step];
    const i32 position = step.pair_begin + work.token_tile * mma::kPairs, count = step.pair_begin + step.pair_count - position;
    const i32 pair = thread_id() / 2, number = work.strip * mma::kWarps + warp;
    const u8* row = row_of(args, step);
    const bool mine = number < strips;
    float sum[2][mma::kTiles][2][4] = {};
    const u8* act = pair < count ? reinterpret_cast<const u8*>(args.act + (position + pair) * args.act_stride) : nullptr;
    if (!lost) mma::multiply(w2_strip(args, row, mine ? number : 0), mine, act, count, stages, sum);
    if (mine) store_answers<mma::kTiles>(args, row, lost, number, position, count, sum);
  }
}
