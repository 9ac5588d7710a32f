// Which experts the tokens want: masks, counts, and the pairs sorted by expert. One block; thread e answers for expert e.
//
// The sort is stable without atomics that decide an order: each warp takes a run of consecutive pairs and has its own row of counts, so a pair's place is
// that of its expert, plus the earlier warps' counts, plus what its own warp met before.
#pragma once
#include "block.cuh"
#include "state.cuh"

constexpr i32 kTable = 6144;   // counts: 24 warps at 256 experts, 6 at 1024
struct Routing {
  u32 table[kTable];           // [warp][expert]: pairs; then where the next one goes
};

// Five counts that are summed as one: fewer than 2^20 pairs, up to 2^10 experts of each kind.
enum Field : i32 { kPair = 0, kHit = 20, kMiss = 31, kStaged = 42, kHot = 53 };
DEVICE u64 pack(u32 pairs, bool hit, bool miss, bool staged, bool hot) {
  return pairs | static_cast<u64>(hit) << kHit | static_cast<u64>(miss) << kMiss | static_cast<u64>(staged) << kStaged | static_cast<u64>(hot) << kHot;
}
DEVICE i32 unpack(u64 sums, Field field) { return static_cast<i32>(sums >> field & (field == kPair ? 0xfffff : 0x7ff)); }

// Where a pair routes to; -1: nowhere. Ids out of range too: they would name another layer's rows.
DEVICE i32 expert_of(const LayerArgs& a, i32 pair) {
  const i32 id = a.topk_ids[pair];
  if (static_cast<u32>(id) >= static_cast<u32>(a.experts)) return -1;
  return a.kv_slots && a.kv_slots[pair / a.top_k] < 0 ? -1 : id;
}

struct Share { i32 warps, begin, end; };   // warps that count, and this warp's pairs
DEVICE Share share_of(const LayerArgs& a, i32 pairs) {
  i32 warps = kTable / a.experts;
  const i32 most = thread_count() / 32, needed = (pairs + 31) / 32;
  warps = warps < most ? warps : most;
  warps = warps < needed ? warps : needed;
  if (warps == 0) return {0, 0, 0};
  const i32 each = (pairs + warps * 32 - 1) / (warps * 32) * 32, begin = thread_id() / 32 * each, end = begin + each;
  return thread_id() / 32 < warps ? Share{warps, begin < pairs ? begin : pairs, end < pairs ? end : pairs} : Share{warps, 0, 0};
}

// Pairs of expert thread_id(). Adds tokens that are no padding to `live`, in shared memory. Two barriers.
DEVICE u32 count_pairs(const LayerArgs& a, i32 pairs, Routing& routing, u32& live) {
  const Share share = share_of(a, pairs);
  for (i32 i = thread_id(); i < share.warps * a.experts; i += thread_count()) routing.table[i] = 0;
  if (thread_id() == 0) live = 0;
  sync_block();
  u32* mine = routing.table + thread_id() / 32 * a.experts;
  u32 tokens = 0;
  for (i32 from = share.begin + thread_id() % 32; from < share.end; from += 128) {
    i32 expert[4];
#pragma unroll
    for (i32 q = 0; q < 4; ++q) expert[q] = from + 32 * q < share.end ? expert_of(a, from + 32 * q) : -1;
#pragma unroll
    for (i32 q = 0; q < 4; ++q) {
      const i32 pair = from + 32 * q;
      if (expert[q] >= 0) atomic_add_shared(mine + expert[q], 1);
      tokens += pair < share.end && pair % a.top_k == 0 && !(a.kv_slots && a.kv_slots[pair / a.top_k] < 0);
    }
  }
  if (tokens) atomic_add_shared(&live, tokens);
  sync_block();
  u32 sum = 0;
  if (thread_id() < a.experts)
    for (i32 w = 0; w < share.warps; ++w) sum += routing.table[w * a.experts + thread_id()];
  return sum;
}

// Lanes whose expert is this lane's.
DEVICE u32 same_expert(i32 expert, i32 experts) {
  u32 same = ballot(expert >= 0);
  for (i32 bit = 0; (experts - 1) >> bit; ++bit) {
    const bool set = expert >> bit & 1;
    const u32 lanes = ballot(set);
    same &= set ? lanes : ~lanes;
  }
  return same;
}

// Writes the sorted pairs, those of expert thread_id() from `begin` on. One barrier, and none at the end.
DEVICE void place_pairs(const LayerArgs& a, i32 pairs, Routing& routing, u32 begin, i32* sorted) {
  const Share share = share_of(a, pairs);
  if (thread_id() < a.experts)
    for (i32 w = 0; w < share.warps; ++w) {
      u32& count = routing.table[w * a.experts + thread_id()];
      const u32 before = begin;
      begin += count;
      count = before;
    }
  sync_block();
  u32* mine = routing.table + thread_id() / 32 * a.experts;
  const i32 lane = thread_id() % 32;
  i32 next = share.begin + lane < share.end ? expert_of(a, share.begin + lane) : -1;
  for (i32 from = share.begin; from < share.end; from += 32) {
    const i32 expert = next, pair = from + lane;
    next = pair + 32 < share.end ? expert_of(a, pair + 32) : -1;
    const u32 same = same_expert(expert, a.experts), earlier = same & ((1u << lane) - 1);
    if (expert >= 0) sorted[mine[expert] + popcount(earlier)] = pair;
    sync_warp();
    if (expert >= 0 && !earlier) mine[expert] += popcount(same);
    sync_warp();
  }
}
