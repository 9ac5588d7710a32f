// resolve: what a layer needs before its GEMMs, in one block: pairs sorted by expert, a slot for every expert, waves. As cache/reference.py's begin(), on
// the same trace: the same slots, victims, heat and counts.
#pragma once
#include "few.cuh"
#include "plan.cuh"
#include "route.cuh"
#include "slots.cuh"

struct ResolveMemory {
  Layer layer;
  PerWarp warps, minima;
  u32 counter[2], live;
  i32 waves, lost, first[kMaxWaves + 1];
  bool done;
  union {
    Routing routing;
    Gathered gathered;
    Lists lists;
    Few few;
  };
};

// The layer's misses get slots, its hits in staging their place. All threads; m.layer is complete.
DEVICE void take_slots(const LayerArgs& a, ResolveMemory& m, const Counts& n, u32 bound) {
  SlotClass& c = *a.slots;
  i32 free_count;
  const i32 staging = gather(a, m.layer, m.lists, m.gathered, n.misses, free_count, m.warps, m.counter);
  Sequence q = {0, staging, 0, 0, c.newest, c.oldest, 0, 0, 0, ~0u, 1, false};
  Coldest mine = {};
  u64 coldest = static_cast<u64>(bound) << 32, any = bound;
  bool known = false;
  for (;;) {
    if (thread_id() == 0) m.done = advance(a, m.layer, m.lists, free_count, n, q, coldest, known);
    sync_block();
    if (m.done) break;
    // Thread 0 asks for the coldest row: for the first time, or because the one it knew has left the working set.
    if (!known || mine.candidate == coldest) mine = coldest_of_mine(a, m.layer);
    known = true;
    coldest = block_minimum(m.minima, mine.candidate);
    any = block_minimum(m.warps, mine.any);   // of most threads as they saw it the first time: what joined since is in q.joined
    sync_block();
  }
  if (thread_id() == 0) {
    c.newest = q.newest, c.oldest = q.oldest;
    c.coldest = any < q.joined ? static_cast<u32>(any) : q.joined;
    c.evictions += q.evictions, c.admitted += q.admitted;
    m.waves = q.waves, m.lost = static_cast<i32>(q.lost);
  }
}

// All threads of one block.
DEVICE void resolve_layer(const LayerArgs& args) {
  SHARED(ResolveMemory, m);
  SlotClass& c = *args.slots;
  Control& control = *args.control;
  Plan& plan = *args.plan;
  const i32 t = thread_id(), row = args.first_row + t;
  const i32 few = threads_of_few(args);
  if (few) {   // others clear meanwhile
    clear(plan, control, args.experts, few);
    begin_layer(args, control.armed);
    if (resolve_few(args, m.few, few)) return;
    sync_block();   // all have read what stands where other things will
  }
  const i32 pairs = control.armed ? args.tokens * args.top_k : 0;
  // Loads that need no routing go first: three round trips to memory beside the one of the ids.
  i32 slot = t < args.experts ? c.slot_of[row] : -1;
  u32 heat = t < args.experts ? c.heat[row] : 0;
  const i64 touched_before = c.touches, newest = c.newest;
  i32* const sorted = plan.pairs;
  u32 bound = c.coldest;
  const bool valid = slot >= 0 && c.valid[slot];
  const bool staging = slot >= 0 && c.stamp[slot] != kWorking;
  if (!few) {
    clear(plan, control, args.experts);
    begin_layer(args, control.armed);
  }

  const u32 mine = count_pairs(args, pairs, m.routing, m.live);
  const bool hit = mine && valid, miss = mine && !valid, staged = hit && staging;
  const bool hot = staged && heat + kHeatUnit > bound + c.hysteresis;   // it may join the working set
  u64 sum;
  const u64 before = block_prefix(m.warps, pack(mine, hit, miss, staged, hot), sum);
  const Counts n = {unpack(sum, kHit), unpack(sum, kMiss), unpack(sum, kStaged)};
  const i32 count = n.hits + n.misses, pair_begin = unpack(before, kPair);
  const i32 index = hit ? unpack(before, kHit) : n.hits + unpack(before, kMiss);
  const bool ages = count && touched_before + count >= c.age_every;
  // The usual layer: all is there, and nothing of staging is hot enough to join the working set.
  const bool settled = !n.misses && (!n.staged || (!unpack(sum, kHot) && !ages));

  if (ages) {
    for (i32 r = t; r < c.rows; r += thread_count()) c.heat[r] >>= 1;
    heat >>= 1, bound >>= 1;
    if (t == 0) c.coldest = bound;
    sync_block();
  }
  if (mine) {
    heat += heat < kHeatMax ? kHeatUnit : 0;
    c.heat[row] = heat;
  }
  if (t == 0 && count) c.touches = ages ? 0 : touched_before + count;
  if (t < args.experts) m.layer.index[t] = mine ? static_cast<u16>(index) : kAbsent;
  if (mine) {
    m.layer.expert[index] = static_cast<u16>(t), m.layer.heat[index] = heat, m.layer.slot[index] = slot;
    m.layer.position[index] = kAbsent, m.layer.wave[index] = 0, m.layer.within[index] = static_cast<u16>(index);
    if (staged) m.layer.staged[unpack(before, kStaged)] = static_cast<u16>(index);
    if (staged && settled) c.stamp[slot] = newest + unpack(before, kStaged);
  }
  for (i32 w = t; w < kMaxWaves; w += thread_count()) m.layer.in_wave[w] = w ? 0 : static_cast<u32>(n.hits);
  if (t == 0) m.waves = count > 0, m.lost = 0;
  if (t == 0 && settled && n.staged) c.newest = newest + n.staged;
  place_pairs(args, pairs, m.routing, static_cast<u32>(pair_begin), sorted);
  sync_block();

  if (!settled) {
    take_slots(args, m, n, bound);
    sync_block();
  }
  write_waves(plan, m.layer.in_wave, m.waves, m.first);
  sync_block();
  if (mine) {
    const bool lost = m.layer.wave[index] == kMaxWaves;   // no wave is left for it: it fails, in the last one
    const i32 wave = lost ? kMaxWaves - 1 : m.layer.wave[index], at = m.first[wave] + m.layer.within[index];
    plan.steps[at] = {t, row, m.layer.slot[index], wave, hit, pair_begin, static_cast<i32>(mine), -1};
    if (lost) plan.ready[at] = kFailedRow;
  }
  if (t == 0) finish_plan(plan, count, m.waves, n.misses, static_cast<i32>(m.live), nullptr);
  if (t == 0 && count) {
    count_gpu(&control.counter[kHits], static_cast<u64>(n.hits));
    count_gpu(&control.counter[kMisses], static_cast<u64>(n.misses));
    count_gpu(&control.counter[kWaves], static_cast<u64>(m.waves));
    count_gpu(&control.counter[kLayers], 1);
    if (m.lost) count_failures(control, static_cast<u32>(m.lost));
  }
}

KERNEL(resolve, LayerArgs, args, kResolveThreads) { resolve_layer(args); }

// The replay baseline's: what has a slot is used, what has none contributes zeros and is listed. No bookkeeping.
KERNEL(resolve_lookup, LookupArgs, args, kResolveThreads) {
  struct Memory {
    Routing routing;
    PerWarp warps;
    u32 live;
  };
  SHARED(Memory, m);
  const LayerArgs& a = args.layer;
  SlotClass& c = *a.slots;
  Control& control = *a.control;
  Plan& plan = *a.plan;
  const i32 t = thread_id(), row = a.first_row + t;
  const i32 pairs = control.armed ? a.tokens * a.top_k : 0;
  const i32 slot = t < a.experts ? c.slot_of[row] : -1;
  const bool valid = slot >= 0 && c.valid[slot];
  clear(plan, control, a.experts);
  begin_layer(a, control.armed);
  const u32 mine = count_pairs(a, pairs, m.routing, m.live);
  const bool hit = mine && valid, miss = mine && !valid;
  u64 sum;
  const u64 before = block_prefix(m.warps, pack(mine, hit, miss, false, false), sum);
  const i32 hits = unpack(sum, kHit), misses = unpack(sum, kMiss), pair_begin = unpack(before, kPair), nth = unpack(before, kMiss);
  place_pairs(a, pairs, m.routing, static_cast<u32>(pair_begin), plan.pairs);
  if (mine) {
    const i32 at = hit ? unpack(before, kHit) : hits + nth;
    plan.steps[at] = {t, row, hit ? slot : 0, 0, hit, pair_begin, static_cast<i32>(mine), -1};
    if (miss) plan.ready[at] = kFailedRow;
  }
  const i32 listed = args.list[0];
  sync_block();   // all have read it
  if (miss && listed + nth < args.capacity) args.list[1 + listed + nth] = row;
  for (i32 w = t; w <= kMaxWaves; w += thread_count()) plan.wave_begin[w] = w ? hits + misses : 0;
  if (t == 0) {
    const i32 wanted = listed + misses;
    args.list[0] = wanted < args.capacity ? wanted : args.capacity;
    finish_plan(plan, hits + misses, hits + misses > 0, misses, static_cast<i32>(m.live), nullptr);
    if (hits + misses) {
      count_gpu(&control.counter[kHits], static_cast<u64>(hits));
      count_gpu(&control.counter[kMisses], static_cast<u64>(misses));
      count_gpu(&control.counter[kLayers], 1);
    }
  }
}
