// resolve for the usual decode step: few pairs, whose rows are all there and stay where they are. A thread for each pair and three round trips to memory (ids and
// pointers, slots and heat, what is valid), where resolve.cuh's block takes five, and seven barriers of all its threads. Plan and bookkeeping get the same bytes.
#pragma once
#include "plan.cuh"
#include "slots.cuh"

constexpr i32 kFew = 128;      // pairs
struct Few {
  u32 key[kFew];               // expert and pair; ~0: it routes nowhere
  u8 mark[kFew];               // of the pairs in order, see Mark
  Vec4 marked[3];              // the same as bits
  u32 live;
};
enum Mark : u32 { kFirst = 1, kStagedOne = 2, kUnsettled = 4 };   // its expert's first pair, and of these: in staging; not there, or about to join the working set

DEVICE i32 threads_of_few(const LayerArgs& a) {   // 0: too many pairs, or no other threads in the block
  const i32 threads = (a.tokens * a.top_k + 31) / 32 * 32;
  return threads <= kFew && threads < thread_count() ? threads : 0;
}
static_assert(kFew == 128, "four words");
DEVICE i32 popcount(const Vec4& v) { return popcount(v.x) + popcount(v.y) + popcount(v.z) + popcount(v.w); }
DEVICE Vec4 before(const Vec4& v, i32 at) {
  const auto word = [&](u32 w, i32 first) { return at >= first + 32 ? w : at > first ? w & ((1u << (at - first)) - 1) : 0; };
  return {word(v.x, 0), word(v.y, 32), word(v.z, 64), word(v.w, 96)};
}

// All threads of a block, of which the first `threads` do it, as threads_of_few says. Barriers of a part of the block would be enough; tools that look for races lose their
// way behind them. False: it is not such a layer, and nothing has been written.
DEVICE bool resolve_few(const LayerArgs& a, Few& few, i32 threads) {
  const SlotClass& c = *a.slots;
  Plan& plan = *a.plan;
  const i32 t = thread_id(), pairs = a.tokens * a.top_k, token = t / a.top_k;
  const i32 id = t < pairs ? a.topk_ids[t] : -1;
  const i64 kv = t < pairs && a.kv_slots ? a.kv_slots[token] : 0;
  const u32 armed = a.control->armed, bound = c.coldest, hysteresis = c.hysteresis;
  const i32* const slot_of = c.slot_of;
  u32 *const heat_of = c.heat, *const valid = c.valid;
  i64* const stamps = c.stamp;
  const i64 touched = c.touches, age_every = c.age_every, newest = c.newest;
  i32* const sorted = plan.pairs;
  const bool mine = t < threads;
  if (t == 0) few.live = 0;
  const bool live = armed && kv >= 0 && t < pairs, routes = live && static_cast<u32>(id) < static_cast<u32>(a.experts);   // as expert_of
  const i32 row = a.first_row + id, slot = routes ? slot_of[row] : -1;
  const u32 heat = routes ? heat_of[row] : 0, key = routes ? static_cast<u32>(id * kFew + t) : ~0u;
  if (mine) few.key[t] = key, few.mark[t] = 0;
  if (t < 3) few.marked[t] = {0, 0, 0, 0};
  sync_block();

  // Its place among all, by expert; how many are of its expert, and how many of these come before it.
  i32 place = 0, same = 0, earlier = 0;
#pragma unroll 1
  for (i32 i = 0; mine && i < pairs; i += 4) {
    const Vec4 v = *reinterpret_cast<const Vec4*>(&few.key[i]);
    const u32 others[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (i32 k = 0; k < 4; ++k) {
      const bool smaller = others[k] < key, alike = others[k] / kFew == key / kFew;
      place += smaller, same += alike, earlier += smaller && alike;
    }
  }
  sync_warp();                 // what follows waits for the slot, and is not to be moved before the loop
  const bool first = routes && !earlier;
  const u32 there = slot >= 0 ? valid[slot] : 0;
  const i64 since = slot >= 0 ? stamps[slot] : kWorking;
  const bool staged = since != kWorking, settles = there && !(staged && heat + kHeatUnit > bound + hysteresis);
  if (routes) few.mark[place] = static_cast<u8>(first ? kFirst | (staged ? kStagedOne : 0) | (settles ? 0 : kUnsettled) : 0);
  if (live && t == token * a.top_k) atomic_add_shared(&few.live, 1);
  sync_block();
  const u32 mark = mine ? few.mark[t] : 0;
#pragma unroll
  for (i32 k = 0; k < 3; ++k) {
    const u32 bits = ballot(mark >> k & 1);
    if (mine && t % 32 == 0) reinterpret_cast<u32*>(&few.marked[k])[t / 32] = bits;
  }
  sync_block();
  const Vec4 firsts = few.marked[0], stageds = few.marked[1];
  const i32 count = popcount(firsts), in_staging = popcount(stageds);
  if (popcount(few.marked[2]) || (count && touched + count >= age_every)) return false;

  if (routes) sorted[place] = t;
  if (first) {
    plan.steps[popcount(before(firsts, place))] = {id, row, slot, 0, 1, place, same, -1};
    heat_of[row] = heat + (heat < kHeatMax ? kHeatUnit : 0);
    if (staged) stamps[slot] = newest + popcount(before(stageds, place));
  }
#pragma unroll 1
  for (i32 w = t; w <= kMaxWaves; w += thread_count()) plan.wave_begin[w] = w ? count : 0;
  if (t) return true;
  finish_plan(plan, count, count > 0, 0, static_cast<i32>(few.live), nullptr);
  if (!count) return true;
  SlotClass& own = *a.slots;
  own.touches = touched + count;
  if (in_staging) own.newest = newest + in_staging;
  count_gpu(&a.control->counter[kHits], static_cast<u64>(count));
  count_gpu(&a.control->counter[kWaves], 1);
  count_gpu(&a.control->counter[kLayers], 1);
  return true;
}
