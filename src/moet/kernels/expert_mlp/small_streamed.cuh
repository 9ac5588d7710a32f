// The expert MLP for few tokens an expert, for formats whose levels are small integers: gate and up with their activation, down, and the sum over places, a wave in
// one launch. Bound by reading the weights; docs/kernels.md has the counts.
//
// A block is alone on its multiprocessor, in groups that share tcq2's table and nothing else. Of a group's six warps four consume: they take an item (queue.cuh), a
// strip of 64 rows and up to four pairs, split K, each with a stream of weights of its own (stream.cuh), and do nothing but multiply. The dispatcher draws the items
// and knows what can be begun; the finisher (finish.cuh) adds up the four sums and does what comes behind them: so what waits for memory or for other blocks is off
// the path of the weights. A down item waits for its step's tiles of w13; these were handed out before it, and no warp that has one of them waits for a later item.
#pragma once
#include "small_integer.cuh"
#include "dispatch.cuh"
#include "finish.cuh"
#include "stream.cuh"

constexpr i32 kWarps = kGroups * (kConsumers + 2), kThreads = 32 * kWarps;

struct Consumer {
  const MlpArgs& args;
  Group& group;
  const i32 warp, lane, g, t;              // warp: 0 .. 3
  const u32 codes_at, scales_at;           // in a stage, the lane's
  Stream stream;
  Inputs next;                             // where the activations are that are loaded next
  Raw loaded[kTiles];                      // those of the next chunk

  // `turns` chunks with kN tiles of activations. loads: those of the chunk behind each of them; asks: for another chunk's weights, each time.
  template <i32 kN> DEVICE_MEMBER void multiply_chunks(i32 turns, bool asks, bool loads, float (&sum)[2][2][kTiles][2]) {
    const bool mine = loads && matches(g, t);
#pragma unroll 1
    for (; turns; --turns) {               // no branches: one block of instructions, loads among products
      Raw now[kN];
#pragma unroll
      for (i32 n = 0; n < kN; ++n) now[n] = loaded[n];
      next.load<kN>(loaded, kConsumers, loads, mine);
      const u32 stage = stream.take(asks), codes = stage + codes_at, scales = stage + scales_at;
      Packed packed[2];
#pragma unroll
      for (i32 half = 0; half < 2; ++half) load_packed(packed[half], codes, scales, half);
      multiply<kN>(packed, now, g, t, 4 * lane, sum);
    }
  }
  // All chunks of an item for this warp; the sums are in shared memory then. True: the first activations of `ahead` are loaded, the item behind it, which can be if
  // its barrier is over.
  DEVICE_MEMBER bool multiply_item(const Told& told, u32 sums_parity, const Told& ahead, u64* ahead_ready, u32 ahead_parity) {
    const bool one = kTiles == 1 || uniform(told.item.count) <= kTilePairs;   // a second tile costs a third more
    float sum[2][2][kTiles][2] = {};
    bool opened = false;
    for (i32 turns = (uniform(told.chunks) - warp + kConsumers - 1) / kConsumers, some; turns > 0; turns -= some) {
      if (turns == 1 && is_over(ahead_ready, ahead_parity)) {
        opened = ahead.item.kind != kNothingLeft && ahead.readable && warp < ahead.chunks && ahead.item.count <= (one ? 1 : kTiles) * kTilePairs;
        if (opened) next.open(ahead.codes, ahead.sums, warp, g, t);
      }
      if (!stream.steady(1)) stream.catch_up();
      some = stream.steady(turns > 1 ? turns - 1 : 1);
      const bool asks = some, loads = turns > 1 || opened;
      if (!asks) some = 1;
      stream.plan_turns(some, asks);
      if (one) multiply_chunks<1>(some, asks, loads, sum);
      else multiply_chunks<kTiles>(some, asks, loads, sum);
    }
    barrier_wait(&group.spare, sums_parity ^ 1);
    store_sums(group.sums[warp], kPitch, sum, g, t);
    barrier_arrive(&group.summed);
    return opened;
  }
  DEVICE_MEMBER void run(u32 stages) {
    stream.begin(stages);
#pragma unroll
    for (i32 n = 0; n < kTiles; ++n) loaded[n] = {};
    Place<kItems> place = {0, 0};
    bool opened = false;
    for (u32 sums_parity = 0;;) {
      const Told& told = group.told[place.at];
      u64 *heard = &group.heard[place.at], *ready = &group.ready[place.at];
      if (!is_over(ready, place.parity)) {   // weights come before its activations are there
        barrier_wait(&group.known[place.at], place.parity);
        stream.fill(0);
        barrier_wait(ready, place.parity);
      }
      if (told.item.kind == kNothingLeft) return;
      if (warp == 0 && lane == 0) barrier_arrive(&group.begun[place.at % 2]);
      place.advance();
      if (told.readable) {
        if (!opened) {
          const bool there = warp < told.chunks;
          next.open(told.codes, told.sums, warp, g, t);
          next.load<kTiles>(loaded, kConsumers, there, there && matches(g, t));
        }
        opened = multiply_item(told, sums_parity, group.told[place.at], &group.ready[place.at], place.parity);
        sums_parity ^= 1;
      }
      stream.open_next();                  // past this item, if it had no chunk for this warp
      barrier_arrive(heard);
    }
  }
};

KERNEL_ALONE(mlp_small, MlpArgs, args, kThreads) {
  DYNAMIC_SHARED(memory);   // the groups, their stages, the table
  const Plan& plan = *args.layer.plan;
  auto* groups = reinterpret_cast<Group*>(memory);
  if (kTable) fill_table(memory + (kTableAt - shared_address(memory)));
  if (thread_id() < kGroups) open_group(groups[thread_id()]);
  barriers_ready();
  sync_block();
  const i32 warp = uniform(thread_id() / 32), lane = thread_id() % 32;
  wait_for_launch_before();
  const Vec4 head = load_vector(reinterpret_cast<const u8*>(&plan), 0);   // count, waves, misses, live_tokens
  if (warp / kGroups == kConsumers) touch_plan(args, lane);
  const i32 waves = static_cast<i32>(head.y), misses = static_cast<i32>(head.z);
  if (args.wave == 0 && waves == 0 && args.combines) {
    clear_outputs(args);
    return;
  }
  if (args.wave >= waves) return;
  if (misses) fetch_first(args);
  if (warp < kGroups * kConsumers) {
    if (kMovesRegisters) more_registers<104>();
    Group& group = groups[warp / kConsumers];
    const u32 stages = shared_address(memory) + kStreamAt + warp * Stream::kRing;
    const i32 number = warp % kConsumers, g = lane / 4, t = lane % 4;
    Consumer{args, group, number, lane, g, t, codes_of(g, t), scales_of(g, t), {args, group, number, lane, stages + Stream::kRing}, {}, {}}.run(stages);
  } else if (warp < kGroups * (kConsumers + 1)) {
    if (kMovesRegisters) fewer_registers<32>();
    const i32 group = warp - kGroups * kConsumers;
    Dispatcher{args, groups[group], lane, misses == 0}.run(group * block_count() + block_id());
  } else {
    if (kMovesRegisters) fewer_registers<32>();
    Finisher{args, groups[warp - kGroups * (kConsumers + 1)], lane}.run();
  }
}
