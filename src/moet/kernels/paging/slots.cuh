// Which slot a missing row takes: cache/reference.py's begin(), by one block. What is parallel is done by all threads: the lists are gathered from the slot
// table, and the coldest row is found. What each decision leaves to the next one is done by thread 0, in shared memory.
//
// The coldest row is looked for when a row of staging could be hotter, and again after each admission, for within a layer nothing else changes the
// answer: heat is settled before, and the slots that the layer uses are no candidates from the start. What was found bounds the coldest row of later layers
// too (SlotClass.coldest), with the heat of the rows that have joined the working set since: heat only grows, but for halvings. So most layers need not look.
#pragma once
#include "block.cuh"
#include "state.cuh"

constexpr u32 kHeatUnit = 16, kHeatMax = 1u << 30;
constexpr i32 kQueue = kMaxStaging + kMaxExperts;
static_assert((kQueue & (kQueue - 1)) == 0, "indices wrap");
constexpr u64 kNobody = ~0ull;

// Staging, oldest first, from head on. A slot that becomes the newest leaves -1 where it was.
struct Queue {
  i32 slot[kQueue], row[kQueue];
  u16 wave[kQueue];            // in which the slot is free for this layer
};
struct Lists {
  Queue queue;
  i32 free[kMaxExperts];       // slots of the working set without a row, ascending
};
struct Gathered {              // staging in no order
  i64 stamp[kMaxStaging];
  i32 slot[kMaxStaging], row[kMaxStaging];
};

// Distinct experts of the layer: hits in ascending order, then misses.
struct Layer {
  u16 expert[kMaxExperts];
  u16 index[kMaxExperts];      // of an expert; kAbsent: not in this layer
  u32 heat[kMaxExperts];
  i32 slot[kMaxExperts];       // its own; -1: none yet
  u16 position[kMaxExperts];   // of its slot in Queue; kAbsent: it is not in staging
  u16 wave[kMaxExperts], within[kMaxExperts];   // within: steps of that wave before it
  u16 staged[kMaxExperts];     // hits in staging
  u32 in_wave[kMaxWaves];
};
constexpr u16 kAbsent = 0xffff;

struct Sequence {              // thread 0's
  i32 head, tail, free, at;    // at: which row is next, staged hits first
  i64 newest, oldest;
  u32 evictions, admitted, lost;
  u32 joined;                  // heat of the coldest row that has joined the working set
  i32 waves;
  bool considering;            // row `at` has its slot; whether it is admitted hangs on the coldest row
};

struct Counts { i32 hits, misses, staged; };

DEVICE bool of_this_layer(const LayerArgs& a, const Layer& layer, i32 row) {
  const u32 expert = static_cast<u32>(row - a.first_row);
  return expert < static_cast<u32>(a.experts) && layer.index[expert] != kAbsent;
}

struct Coldest {
  u64 candidate;               // heat in the high half, slot in the low one
  u64 any;                     // heat; of the whole working set
};

// Of this thread's slots.
DEVICE Coldest coldest_of_mine(const LayerArgs& a, const Layer& layer) {
  const SlotClass& c = *a.slots;
  const i32 step = thread_count();
  Coldest coldest = {kNobody, kNobody};
  for (i32 from = thread_id(); from < c.slots; from += 4 * step) {
    i64 stamp[4];
    i32 row[4];
    u32 heat[4];
#pragma unroll
    for (i32 q = 0; q < 4; ++q) {
      const i32 s = from + q * step;
      stamp[q] = s < c.slots ? c.stamp[s] : 0;
      row[q] = s < c.slots ? c.row_of[s] : -1;
    }
#pragma unroll
    for (i32 q = 0; q < 4; ++q) {
      if (stamp[q] != kWorking) row[q] = -1;
      heat[q] = row[q] >= 0 ? c.heat[row[q]] : 0;
    }
#pragma unroll
    for (i32 q = 0; q < 4; ++q) {
      if (row[q] < 0) continue;
      const u64 key = static_cast<u64>(heat[q]) << 32 | static_cast<u32>(from + q * step);
      if (heat[q] < coldest.any) coldest.any = heat[q];
      if (key < coldest.candidate && !of_this_layer(a, layer, row[q])) coldest.candidate = key;
    }
  }
  return coldest;
}

// Fills the queue and the list of free slots, of which at most `wanted` are of use. Returns how many staging slots there are.
DEVICE i32 gather(const LayerArgs& a, Layer& layer, Lists& lists, Gathered& gathered, i32 wanted, i32& free_count, PerWarp& warps, u32 (&counter)[2]) {
  Queue& queue = lists.queue;
  const SlotClass& c = *a.slots;
  const i32 step = thread_count();
  if (thread_id() < 2) counter[thread_id()] = 0;
  sync_block();
  for (i32 from = thread_id(); from < c.slots; from += 4 * step) {
    i64 stamp[4];
    i32 row[4];
#pragma unroll
    for (i32 q = 0; q < 4; ++q) {
      const i32 s = from + q * step;
      stamp[q] = s < c.slots ? c.stamp[s] : kWorking;
      row[q] = s < c.slots ? c.row_of[s] : 0;
    }
#pragma unroll
    for (i32 q = 0; q < 4; ++q) {
      if (stamp[q] != kWorking) {
        const u32 n = atomic_add_shared(&counter[0], 1);
        if (n < static_cast<u32>(kMaxStaging)) gathered.stamp[n] = stamp[q], gathered.slot[n] = from + q * step, gathered.row[n] = row[q];
      } else if (row[q] < 0) {
        atomic_add_shared(&counter[1], 1);
      }
    }
  }
  sync_block();
  const i32 count = counter[0] < static_cast<u32>(kMaxStaging) ? static_cast<i32>(counter[0]) : kMaxStaging;
  const bool any_free = counter[1] != 0, mine = thread_id() < count;
  i32 rank = 0, slot = 0, row = -1;
  if (mine) {
    const i64 stamp = gathered.stamp[thread_id()];
    slot = gathered.slot[thread_id()], row = gathered.row[thread_id()];
    for (i32 i = 0; i < count; ++i) rank += gathered.stamp[i] < stamp;
  }
  sync_block();   // the queue lies where `gathered` did
  if (mine) {
    queue.slot[rank] = slot, queue.row[rank] = row, queue.wave[rank] = 0;
    if (row >= 0 && of_this_layer(a, layer, row)) layer.position[layer.index[row - a.first_row]] = static_cast<u16>(rank);
  }
  free_count = 0;
  for (i32 from = 0; any_free && from < c.slots && free_count < wanted; from += step) {
    const i32 s = from + thread_id();
    const bool is = s < c.slots && c.stamp[s] == kWorking && c.row_of[s] < 0;
    u64 found;
    const i32 n = free_count + static_cast<i32>(block_prefix(warps, is, found));
    if (is && n < wanted) lists.free[n] = s;
    free_count += static_cast<i32>(found);
    sync_block();
  }
  free_count = free_count < wanted ? free_count : wanted;
  sync_block();
  return count;
}

DEVICE void push_newest(SlotClass& c, Queue& queue, Sequence& q, i32 slot, i32 row, i32 wave) {
  const i32 at = q.tail++ & (kQueue - 1);
  queue.slot[at] = slot, queue.row[at] = row, queue.wave[at] = static_cast<u16>(wave);
  c.stamp[slot] = q.newest++;
}

DEVICE void assign(SlotClass& c, Sequence& q, i32 row, i32 slot, i32 before) {
  if (before >= 0) {
    c.slot_of[before] = -1;
    ++q.evictions;
  }
  c.row_of[slot] = row;
  c.slot_of[row] = slot;
}

// A miss gets its slot. True: it is in staging.
DEVICE bool give_slot(const LayerArgs& a, Layer& layer, Lists& lists, i32 free_count, Sequence& q, i32 i) {
  SlotClass& c = *a.slots;
  Queue& queue = lists.queue;
  const i32 row = a.first_row + layer.expert[i];
  i32 wave = 0;
  bool staging = true;
  if (const i32 own = layer.slot[i]; own >= 0) {   // it was never read, or the read failed: the slot is still the row's
    staging = layer.position[i] != kAbsent;
    if (staging) {
      queue.slot[layer.position[i]] = -1;
      push_newest(c, queue, q, own, row, 1);
    }
  } else if (q.free < free_count) {
    staging = false;
    layer.slot[i] = lists.free[q.free++];
    assign(c, q, row, layer.slot[i], -1);
    if (layer.heat[i] < q.joined) q.joined = layer.heat[i];
  } else {
    while (queue.slot[q.head & (kQueue - 1)] < 0) ++q.head;
    const i32 at = q.head++ & (kQueue - 1), slot = queue.slot[at], before = queue.row[at];
    wave = queue.wave[at];
    if (before >= 0 && of_this_layer(a, layer, before)) {
      const i32 loser = layer.index[before - a.first_row];
      if (loser > i) layer.slot[loser] = -1;   // it waits for its turn with a slot that it has lost now
    }
    layer.slot[i] = slot;
    assign(c, q, row, slot, before);
    push_newest(c, queue, q, slot, row, wave + 1);
  }
  c.valid[layer.slot[i]] = 0;
  if (wave >= kMaxWaves) wave = kMaxWaves - 1, ++q.lost, layer.wave[i] = kMaxWaves;
  else layer.wave[i] = static_cast<u16>(wave);
  layer.within[i] = static_cast<u16>(layer.in_wave[wave]++);
  if (wave >= q.waves) q.waves = wave + 1;
  return staging;
}

// Goes through the layer. False: it cannot go on without the coldest row; known: `coldest` is that, otherwise no row is colder than `coldest`.
DEVICE bool advance(const LayerArgs& a, Layer& layer, Lists& lists, i32 free_count, const Counts& n, Sequence& q, u64 coldest, bool known) {
  SlotClass& c = *a.slots;
  Queue& queue = lists.queue;
  for (; q.at < n.staged + n.misses; ++q.at) {
    const bool hit = q.at < n.staged;
    const i32 i = hit ? layer.staged[q.at] : n.hits + q.at - n.staged;
    if (!q.considering) {
      if (hit) {
        queue.slot[layer.position[i]] = -1;
        push_newest(c, queue, q, layer.slot[i], a.first_row + layer.expert[i], 1);
      } else if (!give_slot(a, layer, lists, free_count, q, i)) {
        continue;
      }
    }
    q.considering = false;
    if (coldest == kNobody || layer.heat[i] <= static_cast<u32>(coldest >> 32) + c.hysteresis) continue;
    if (!known) {
      q.considering = true;
      return false;
    }
    const i32 victim = static_cast<i32>(coldest & 0xffffffffu);
    --q.tail;   // the row's slot is the newest
    c.stamp[layer.slot[i]] = kWorking;
    if (layer.heat[i] < q.joined) q.joined = layer.heat[i];
    const i32 at = --q.head & (kQueue - 1);
    queue.slot[at] = victim, queue.row[at] = c.row_of[victim], queue.wave[at] = 0;
    c.stamp[victim] = q.oldest--;
    ++q.admitted;
    known = false;   // the next coldest is at least as hot
  }
  return true;
}
