// out[token] = sum over its places, in order, of weight * y: float32, rounded once. Rows that are no tokens give zeros.
#pragma once
#include "mlp.cuh"

// Eight columns, 8 * group and on, of one token. Loads do not wait for each other, but for kAtOnce places at a time: y of a place that routes nowhere is any bytes.
DEVICE void combine_columns(const MlpArgs& args, i32 token, i32 group) {
  constexpr i32 kAtOnce = 3;
  const LayerArgs& layer = args.layer;
  const i32 first = token * layer.top_k;
  const u32 armed = layer.control->armed;
  const i64 slot = layer.kv_slots ? layer.kv_slots[token] : 0;
  float sum[8] = {};
  for (i32 k = 0; k < layer.top_k; k += kAtOnce) {
    Vec4 v[kAtOnce];
    float weight[kAtOnce];
    i32 expert[kAtOnce];
#pragma unroll
    for (i32 i = 0; i < kAtOnce; ++i) {
      const i32 pair = first + (k + i < layer.top_k ? k + i : k);
      v[i] = load_words(reinterpret_cast<const u8*>(args.y + static_cast<i64>(pair) * args.hidden + 8 * group));
      weight[i] = args.weights[pair], expert[i] = layer.topk_ids[pair];
    }
#pragma unroll
    for (i32 i = 0; i < kAtOnce; ++i) {
      if (k + i >= layer.top_k || static_cast<u32>(expert[i]) >= static_cast<u32>(layer.experts)) continue;   // as route.cuh: it has no y
      const u32 words[4] = {v[i].x, v[i].y, v[i].z, v[i].w};
#pragma unroll
      for (i32 c = 0; c < 4; ++c) {
        sum[2 * c] = fused_multiply_add(weight[i], as_float(words[c] << 16), sum[2 * c]);
        sum[2 * c + 1] = fused_multiply_add(weight[i], as_float(words[c] & 0xffff0000u), sum[2 * c + 1]);
      }
    }
  }
  const bool live = armed && slot >= 0;
  store16(args.out + static_cast<i64>(token) * args.hidden + 8 * group,
          {live ? pack_bf16(sum[0], sum[1]) : 0, live ? pack_bf16(sum[2], sum[3]) : 0, live ? pack_bf16(sum[4], sum[5]) : 0, live ? pack_bf16(sum[6], sum[7]) : 0});
}

// A strip's columns of all tokens, by thread `thread` of `threads`.
DEVICE void combine_tokens(const MlpArgs& args, i32 strip, i32 thread, i32 threads) {
  const i32 columns = args.hidden - 64 * strip < 64 ? args.hidden - 64 * strip : 64, groups = columns / 8;
  for (i32 i = thread; i < args.layer.tokens * groups; i += threads) combine_columns(args, i / groups, 8 * strip + i % groups);
}

// Nothing routes anywhere: the output is zeros. All blocks.
DEVICE void clear_outputs(const MlpArgs& a) {
  const i32 groups = a.hidden / 8;
  for (i32 i = block_id() * thread_count() + thread_id(); i < a.layer.tokens * groups; i += block_count() * thread_count()) combine_columns(a, i / groups, i % groups);
}

KERNEL(combine, MlpArgs, args, 256) {
  const i32 groups = args.hidden / 8, per_row = (groups + thread_count() - 1) / thread_count();
  if (block_id() == 0 && !args.fetchers) count_lost(args.layer);   // before the step's output exists
  const i32 token = block_id() / per_row, group = block_id() % per_row * thread_count() + thread_id();
  if (group < groups) combine_columns(args, token, group);
}
