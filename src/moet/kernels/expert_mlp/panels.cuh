// How the GEMMs for many tokens hand out work: a panel is up to kMostPairs pairs of an expert times a group of strips.
#pragma once
#include "mlp.cuh"

// In shared memory.
struct Panel {
  i32 step;                // -1: nothing is left
  i32 strip;               // the group's first one
  i32 position, count;     // its pairs in Plan.pairs
  i32 readable;
};

// A warp's way through a launch's panels, alike in its lanes: steps in the order of the plan, for each the tiles of its pairs, for each the groups of strips.
struct Walk {
  i32 first, end, before;  // steps first .. first + 31 are looked at; panels of the steps before them
};
DEVICE Walk begin_walk(const Plan& plan, i32 wave) { return {plan.wave_begin[wave], plan.wave_begin[wave + 1], 0}; }

// All lanes of a warp: panel number `index`, which ascends from call to call. most: pairs of a tile; many: of a step that belongs to this launch, at least; an expert's tiles are of one size, a multiple of 16, but for
// the last.
DEVICE Panel panel_of(const Plan& plan, Walk& walk, i32 index, i32 most, i32 many, i32 strips, i32 group) {
  const i32 lane = thread_id() % 32, groups = (strips + group - 1) / group;
  for (; walk.first < walk.end; walk.first += 32) {
    const i32 step = walk.first + lane;
    i32 begin = 0, pairs = 0;
    if (step < walk.end) begin = plan.steps[step].pair_begin, pairs = plan.steps[step].pair_count;
    if (pairs < many) pairs = 0;
    const i32 tiles = (pairs + most - 1) / most, panels = tiles * groups;
    i32 through = panels;
#pragma unroll
    for (i32 by = 1; by < 32; by *= 2) {
      const i32 other = shuffle_up(through, by);
      if (lane >= by) through += other;
    }
    const i32 all = shuffle(through, 31);
    if (index < walk.before + all) {
      const i32 owner = popcount(ballot(walk.before + through <= index));   // the lanes before it have less
      const i32 inside = index - walk.before - (through - panels), tile = inside / groups;
      const i32 size = tiles ? ((pairs + tiles - 1) / tiles + 15) / 16 * 16 : 0, left = pairs - tile * size;
      const Panel mine = {step, inside % groups * group, begin + tile * size, left < size ? left : size, 1};
      return {shuffle(mine.step, owner), shuffle(mine.strip, owner), shuffle(mine.position, owner), shuffle(mine.count, owner), 1};
    }
    walk.before += all;
  }
  return {-1, 0, 0, 0, 0};
}
