// The work of one launch of small.cuh, of steps with fewer than `many` pairs, in the order in which it is handed out: every (step of the wave, tile of pairs, tile of w13), then every (step, tile of pairs,
// strip of w2).
#pragma once
#include "mlp.cuh"

enum Kind : i32 { kGateUp, kDown, kNothingLeft };
struct Item {
  i32 kind, step, slot, hit;
  i32 strip;               // tile of w13, or strip of w2
  i32 position, count;     // its pairs in Plan.pairs
  i32 parts;               // of the whole step: tiles of w13 times tiles of pairs
  i32 tiles;               // kDown: tiles of pairs of all steps
};

DEVICE Item held(const Item& i) {
  return {uniform(i.kind), uniform(i.step), uniform(i.slot), uniform(i.hit), uniform(i.strip), uniform(i.position), uniform(i.count), uniform(i.parts), uniform(i.tiles)};
}

struct Queue {             // a warp's, alike in its lanes; items are asked for in ascending order
  i32 kind, first;         // steps `first` .. `first` + 31 are looked at
  i32 before;              // items of the steps before them
  i32 tiles;               // of pairs, of all steps, once `kind` is kDown
};
DEVICE i32 first_step(const MlpArgs& a) { return a.wave ? a.layer.plan->wave_begin[a.wave] : 0; }   // without a round trip to memory for the usual wave
DEVICE Queue open_queue(const MlpArgs& a) { return {kGateUp, first_step(a), 0, 0}; }

// All lanes of a warp: item number `index` of the wave. pairs: of a tile.
DEVICE void locate(const MlpArgs& a, Queue& q, i32 index, i32 pairs, Item& out) {
  const Plan& plan = *a.layer.plan;
  const i32 lane = thread_id() % 32, end = plan.wave_begin[a.wave + 1];
  for (;;) {
    if (q.first >= end) {
      if (q.kind == kDown) {
        if (lane == 0) out.kind = kNothingLeft;
        return;
      }
      q = {kDown, first_step(a), q.before, q.before / a.tiles};
    }
    const i32 step = q.first + lane, strips = q.kind == kGateUp ? a.tiles : hidden_padded(a) / 64;
    const Step s = plan.steps[step < kMaxExperts ? step : 0];   // in any case: beside the load of `end`
    const i32 tiles = step < end && s.pair_count < a.many ? (s.pair_count + pairs - 1) / pairs : 0, items = tiles * strips;
    i32 through = items;   // this lane's step
#pragma unroll
    for (i32 i = 1; i < 32; i *= 2) {
      const i32 other = shuffle_up(through, i);
      if (lane >= i) through += other;
    }
    const i32 all = shuffle(through, 31);
    if (index < q.before + all) {
      if (lane == lowest_bit(ballot(index < q.before + through))) {
        const i32 inside = index - q.before - (through - items), tile = inside / strips, position = s.pair_begin + pairs * tile;
        const i32 left = s.pair_begin + s.pair_count - position;
        out = {q.kind, step, s.slot, s.hit, inside % strips, position, left < pairs ? left : pairs, tiles * a.tiles, q.tiles};
      }
      return;
    }
    q.before += all, q.first += 32;
  }
}
