// Scans: batches that touch most experts of every layer once (a prefill). What has a slot is read in place; what has none passes through the ring, two halves
// of `ring` slots behind the class's own, wave after wave, and leaves no trace: no heat, no slot.
//
//   absent_rows     the list of a layer's rows without a slot. Before the layer's routing is known it is every such expert: a large batch wants them all.
//   fetch_ring      brings wave w of the list into half w % 2; the host sees to it that wave w - 2 has been read.
//   resolve_scan    the layer's plan: hits in wave 0 and where they are, absent rows in the wave of their place in the list.
#pragma once
#include "fetch.cuh"
#include "route.cuh"

struct ScanMemory {
  Routing routing;
  PerWarp warps;
  u32 live, in_wave[kMaxWaves];
  i32 first[kMaxWaves + 1];
};

DEVICE bool has_slot(const SlotClass& c, i32 row, i32& slot) {
  slot = c.slot_of[row];
  return slot >= 0 && c.valid[slot];
}

KERNEL(absent_rows, ScanArgs, args, kResolveThreads) {
  SHARED(ScanMemory, m);
  const LayerArgs& a = args.layer;
  const SlotClass& c = *a.slots;
  Absent& absent = *args.absent;
  const i32 t = thread_id();
  const bool armed = a.control->armed && c.ring > 0;
  i32 slot = -1;
  const bool there = t < a.experts && has_slot(c, a.first_row + t, slot);
  for (i32 i = t; i < a.experts; i += thread_count()) absent.ready[i] = 0, absent.copied[i] = 0, absent.order[i] = kUnknown;
  for (i32 w = t; w < kMaxWaves; w += thread_count()) absent.ticket[w] = absent.drawn[w] = 0;
  bool wanted = armed && t < a.experts;
  if (armed && !args.ahead) wanted = count_pairs(a, a.tokens * a.top_k, m.routing, m.live) > 0;
  const bool missing = wanted && !there;
  u64 count;
  const i32 p = static_cast<i32>(block_prefix(m.warps, missing, count));
  if (t < a.experts) absent.position[t] = missing ? p : -1;
  if (missing) absent.steps[p] = {t, a.first_row + t, c.slots + p / c.ring % 2 * c.ring + p % c.ring, p / c.ring, 0, 0, 0, p};
  if (t == 0) {
    absent.count = static_cast<i32>(count), absent.ring = c.ring;
    absent.waves = armed ? (absent.count + c.ring - 1) / c.ring : 0;
    if (a.begins_step) a.control->timed_out = 0;   // here, not in resolve_scan: rows may be on their way before that
  }
}

// As many blocks as a row has shares.
KERNEL(fetch_ring, ScanArgs, args, 512) {
  SHARED(u32, ticket);
  Absent& absent = *args.absent;
  if (args.wave >= absent.waves || args.wave >= kMaxWaves) return;
  if (thread_id() == 0) ticket = atomic_add_gpu(&absent.ticket[args.wave], 1);
  sync_block();
  const i32 begin = args.wave * absent.ring, end = begin + absent.ring;
  const Rows rows = {absent.steps, absent.fetching, absent.ready, absent.copied, absent.order, &absent.drawn[args.wave], begin, end < absent.count ? end : absent.count};
  if (ticket == 0) lead(args.layer, rows, block_count(), false);   // a row that nobody wants fails nobody: see count_lost
  else follow(args.layer, rows, block_count());
}

KERNEL(resolve_scan, ScanArgs, args, kResolveThreads) {
  SHARED(ScanMemory, m);
  const LayerArgs& a = args.layer;
  Control& control = *a.control;
  Plan& plan = *a.plan;
  const Absent& absent = *args.absent;
  const i32 t = thread_id(), row = a.first_row + t, pairs = control.armed ? a.tokens * a.top_k : 0;
  i32 slot = -1;
  const bool there = t < a.experts && has_slot(*a.slots, row, slot);
  const i32 position = t < a.experts ? absent.position[t] : -1;
  clear(plan, control, a.experts);
  if (t == 0 && a.begins_step && control.armed) count_gpu(&control.counter[kSteps], 1);
  for (i32 w = t; w < kMaxWaves; w += thread_count()) m.in_wave[w] = 0;
  const u32 mine = count_pairs(a, pairs, m.routing, m.live);

  // A row that the list has comes through the ring. One that neither the list nor a slot has is lost: nobody brings it.
  const bool hit = mine && position < 0 && there, miss = mine && !hit;
  const i32 wave = position >= 0 ? absent.steps[position].wave : 0;
  const bool lost = miss && (position < 0 || wave >= kMaxWaves);
  u64 sum;
  const u64 before = block_prefix(m.warps, pack(mine, hit, miss, lost, false), sum);
  const i32 hits = unpack(sum, kHit), losses = unpack(sum, kStaged), count = hits + unpack(sum, kMiss), pair_begin = unpack(before, kPair);
  if (mine) atomic_add_shared(&m.in_wave[lost ? 0 : wave], 1);
  place_pairs(a, pairs, m.routing, static_cast<u32>(pair_begin), plan.pairs);
  sync_block();
  const i32 waves = count ? (absent.waves < 1 ? 1 : absent.waves > kMaxWaves ? kMaxWaves : absent.waves) : 0;
  write_waves(plan, m.in_wave, waves, m.first);
  if (mine) {   // hits, lost rows, then those that come, whose waves ascend as they do
    const i32 lost_before = unpack(before, kStaged);
    const i32 at = hit ? unpack(before, kHit) : lost ? hits + lost_before : hits + losses + unpack(before, kMiss) - lost_before;
    plan.steps[at] = {t, row, hit ? slot : lost ? 0 : absent.steps[position].slot, lost ? 0 : wave, hit, pair_begin, static_cast<i32>(mine), lost ? -1 : position};
    if (lost) plan.ready[at] = kFailedRow;
  }
  if (t) return;
  finish_plan(plan, count, waves, count - hits, static_cast<i32>(m.live), absent.ready);
  if (!count) return;
  count_gpu(&control.counter[kScanHits], static_cast<u64>(hits));
  count_gpu(&control.counter[kScanMisses], static_cast<u64>(count - hits));
  count_gpu(&control.counter[kWaves], static_cast<u64>(waves));
  count_gpu(&control.counter[kLayers], 1);
  if (losses) count_failures(control, static_cast<u32>(losses));
}
