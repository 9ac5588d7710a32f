// out[token] = sum over its places, in order, of weight * y: float32, rounded once. Rows that are no tokens give zeros.
#pragma once
#include "mlp.cuh"

// Eight columns, 8 * group and on, of one token.
DEVICE void combine_columns(const MlpArgs& args, i32 token, i32 group) {
  const LayerArgs& layer = args.layer;
  const bool live = layer.control->armed && !(layer.kv_slots && layer.kv_slots[token] < 0);
  float sum[8] = {};
  for (i32 k = 0; live && k < layer.top_k; ++k) {
    const i64 pair = static_cast<i64>(token) * layer.top_k + k;
    if (static_cast<u32>(layer.topk_ids[pair]) >= static_cast<u32>(layer.experts)) continue;   // as route.cuh: it has no y
    const Vec4 v = load_words(reinterpret_cast<const u8*>(args.y + pair * args.hidden + 8 * group));
    const u32 words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (i32 i = 0; i < 4; ++i) {
      sum[2 * i] = fused_multiply_add(args.weights[pair], as_float(words[i] << 16), sum[2 * i]);
      sum[2 * i + 1] = fused_multiply_add(args.weights[pair], as_float(words[i] & 0xffff0000u), sum[2 * i + 1]);
    }
  }
  store16(args.out + static_cast<i64>(token) * args.hidden + 8 * group,
          {pack_bf16(sum[0], sum[1]), pack_bf16(sum[2], sum[3]), pack_bf16(sum[4], sum[5]), pack_bf16(sum[6], sum[7])});
}

KERNEL(combine, MlpArgs, args, 256) {
  const i32 groups = args.hidden / 8, per_row = (groups + thread_count() - 1) / thread_count();
  if (block_id() == 0 && !args.fetchers) count_lost(args.layer);   // before the step's output exists
  const i32 token = block_id() / per_row, group = block_id() % per_row * thread_count() + thread_id();
  if (group < groups) combine_columns(args, token, group);
}
