// The dispatcher of a group of mlp_small (small.cuh), one warp: draws items, finds out where their rows and activations are, and says when they can be begun.
#pragma once
#include "group.cuh"

// What no launch changes, read while the plan is made.
struct Fixed {
  const u8* pool;
  i64 slot_bytes;
  const i32* pairs;
};
DEVICE Fixed fixed_of(const MlpArgs& a) {
  const u32* p = reinterpret_cast<const u32*>(&a.layer.plan->pairs);   // past the L1 cache, which is to hold nothing of the plan yet
  const u64 low = load_relaxed_gpu(p), high = load_relaxed_gpu(p + 1);
  return {a.layer.slots->pool, a.layer.slots->slot_bytes, reinterpret_cast<const i32*>(high << 32 | low)};
}
// What a dispatcher reads first comes to the L1 cache while the kernel still looks at the plan: three trips to memory in one. `to`: any memory; what is loaded for nothing
// is not loaded.
DEVICE void touch_plan(const MlpArgs& a, const i32* pairs, i32 lane, float* to) {
  const Plan& plan = *a.layer.plan;
  const i32 step = plan.steps[lane].slot, end = plan.wave_begin[a.wave + 1], pair = lane < a.layer.tokens * a.layer.top_k ? pairs[lane] : 0;
  to[lane] = as_float(static_cast<u32>(step + end + pair));
}

// The first item of a group, where items are given out without a draw. The last `late` blocks begin late: on the multiprocessors of `begin`'s blocks, after these. They
// get the last of the first items, which with few tokens are down items that wait anyway.
DEVICE i32 first_item(const MlpArgs& a, i32 group) {
  const i32 late = a.late < block_count() ? a.late : 0, early = block_count() - late, b = block_id();
  return b < early ? group * early + b : kGroups * early + group * late + b - early;
}

struct Dispatcher {
  const MlpArgs& args;
  Group& group;
  const Fixed& fixed;
  const i32 lane;
  const bool given;                        // nobody fetches first, and all blocks begin at once: the first items are given out without a draw

  // The row of an item whose bytes were not there when the layer began, by lane 0. False: it cannot be read.
  DEVICE_MEMBER bool await(const Item& item, u64& waited) {
    if (item.kind == kGateUp) return args.fetchers ? await_row(args.layer, item.step, args.fetchers, waited) : !row_failed(*args.layer.plan, item.step);
    await_made(item);
    return !row_failed(*args.layer.plan, item.step);
  }
  DEVICE_MEMBER void await_made(const Item& item) {   // gate and up of a down item
    while (load_relaxed_gpu(&args.layer.plan->made[item.step]) != static_cast<u32>(item.parts)) pause(20);
    fence_gpu();
  }
  // first: the item to begin with, if nobody fetches first.
  DEVICE_MEMBER void run(i32 first) {
    Plan& plan = *args.layer.plan;
    u32* counter = &plan.item[2][args.wave];
    Queue queue = open_queue(args);
    u64 waited = 0;
    Place<kItems> place = {0};
    for (bool begins = given;; begins = false, ++place.number) {
      if (place.number > 1) {   // not before the item in front of it has begun: other groups may be faster, and what they have drawn ahead is what the last items wait for
        const Place<2> before = {place.number - 1};
        barrier_wait(&group.begun[before.at()], before.parity());
      }
      i32 index = first;
      if (!begins) {
        i32 ticket = 0;
        if (lane == 0) ticket = static_cast<i32>(draw_gpu(counter));
        index = shuffle(ticket, 0) + (given ? kGroups * block_count() : 0);
      }
      Told& to = group.told[place.at()];
      barrier_wait(&group.heard[place.at()], place.parity() ^ 1);
      locate(args, queue, index, kPairs, to.item);
      sync_warp();
      const Item& item = to.item;
      const bool gate_up = item.kind == kGateUp, there = item.kind != kNothingLeft;
      if (lane == 0 && there) {
        const u8* row = fixed.pool + item.slot * fixed.slot_bytes;
        const Strip strip = gate_up ? w13_strip(args, row, item.strip) : w2_strip(args, row, item.strip);
        to.row = row, to.strip = strip.at, to.stride = static_cast<i32>(strip.stride), to.blocks = strip.blocks;
        to.chunks = item.hit || await(item, waited) ? (strip.blocks + 1) / 2 : 0;
      }
      if (lane == 0 && !there) to.chunks = -1;
      barrier_arrive(&group.known[place.at()]);
      if (lane < kPairs && there) {
        const i32 own = item.position + (lane < item.count ? lane : 0), pair = fixed.pairs[own], from = gate_up ? pair / args.layer.top_k : own;
        const Planes& planes = gate_up ? args.x_planes : args.act_planes;
        const u32 at = static_cast<u32>(from) * (gate_up ? hidden_padded(args) / 32 : static_cast<u32>(args.act_stride) / 32);
        to.codes[lane] = planes.codes + static_cast<u64>(at) * 64, to.exponents[lane] = reinterpret_cast<const u8*>(planes.exponents + at);
        to.broken[lane] = planes.broken + from, to.pair[lane] = pair;
      }
      if (lane == 0 && item.kind == kDown) await_made(item);
      barrier_arrive(&group.ready[place.at()]);
      if (!there) break;
    }
    if (args.fetchers && lane == 0) count_stall(args.layer, args.wave, waited);
  }
};
