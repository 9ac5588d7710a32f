// The dispatcher of a group of mlp_small (small_streamed.cuh), one warp: draws items, finds out where their rows and activations are, and says when they can be begun.
#pragma once
#include "group.cuh"

// What a dispatcher reads first comes to the L1 cache while the kernel still looks at the plan: four round trips to memory in one.
DEVICE void touch_plan(const MlpArgs& a, i32 lane) {
  const Plan& plan = *a.layer.plan;
  const auto touch = [](const void* p) { load_single(static_cast<const u8*>(p), 0); };
  touch(&plan.steps[lane]);
  touch(&plan.wave_begin[a.wave + 1]);
  touch(&plan.pairs);
  touch(&a.layer.slots->pool);
  touch(&a.layer.slots->slot_bytes);
}

struct Dispatcher {
  const MlpArgs& args;
  Group& group;
  const i32 lane;
  const bool given;                        // nobody fetches first, all begin at once: the first items are given out without a draw

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
    const SlotClass& slots = *args.layer.slots;
    u32* counter = &plan.item[0][args.wave];
    Queue queue = open_queue(args);
    u64 waited = 0;
    Place<kItems> place = {0, 0};
    Place<2> turn = {0, 0};
    for (bool begins = given;; begins = false, place.advance(), turn.advance()) {
      barrier_wait(&group.begun[turn.at], turn.parity ^ 1);
      i32 index = first;
      if (!begins) {
        i32 ticket = 0;
        if (lane == 0) ticket = static_cast<i32>(draw_gpu(counter));
        index = shuffle(ticket, 0) + (given ? kGroups * block_count() : 0);
      }
      Told& to = group.told[place.at];
      barrier_wait(&group.heard[place.at], place.parity ^ 1);
      locate(args, queue, index, kPairs, to.item);
      sync_warp();
      const Item& item = to.item;
      const bool gate_up = item.kind == kGateUp, there = item.kind != kNothingLeft;
      if (lane == 0 && there) {
        const u8* row = slots.pool + item.slot * slots.slot_bytes;
        const Strip strip = gate_up ? w13_strip(args, row, item.strip) : w2_strip(args, row, item.strip);
        to.row = row, to.strip = strip.at, to.stride = static_cast<i32>(strip.stride), to.blocks = strip.blocks, to.chunks = (strip.blocks + 1) / 2;
        to.readable = item.hit || await(item, waited);
      }
      barrier_arrive(&group.known[place.at]);
      if (lane < kPairs && there) {
        const i32 own = item.position + (lane < item.count ? lane : 0), pair = plan.pairs[own], from = gate_up ? pair / args.layer.top_k : own;
        const Planes& planes = gate_up ? args.x_planes : args.act_planes;
        const u32 at = static_cast<u32>(from) * (gate_up ? hidden_padded(args) / 32 : static_cast<u32>(args.act_stride) / 32);
        to.codes[lane] = planes.codes + static_cast<u64>(at) * 64, to.sums[lane] = reinterpret_cast<const u8*>(planes.blocks) + static_cast<u64>(at) * sizeof(PlaneBlock);
        to.broken[lane] = planes.broken + from, to.pair[lane] = pair;
      }
      if (lane == 0 && item.kind == kDown) await_made(item);
      barrier_arrive(&group.ready[place.at]);
      if (!there) break;
    }
    if (args.fetchers && lane == 0) count_stall(args.layer, args.wave, waited);
  }
};
