// The expert MLP for few tokens an expert (decoding): gate and up with their activation, down, and the sum over places, a wave in one launch. Bound by reading the
// weights; docs/kernels.md has the counts.
//
// A block is alone on its multiprocessor, in groups that share tcq2's table and nothing else. Of a group's six warps four consume: they take an item (queue.cuh), a
// strip of 64 rows and up to kPairs pairs, split K, each with a stream of weights of its own (stream.cuh), and do nothing but multiply. The dispatcher draws the items
// and knows what can be begun; the finisher (finish.cuh) adds up the four sums and does what comes behind them: so what waits for memory or for other blocks is off
// the path of the weights. A down item waits for its step's tiles of w13; these were handed out before it, and no warp that has one of them waits for a later item.
#pragma once
#if FORMAT == 3 || FORMAT == 4 || FORMAT == 5
#include "small_float.cuh"
#else
#include "small_integer.cuh"
#endif
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
  Raw raw[kTiles];                         // those of the next chunk
  Words words;                             // and its first half

  // `turns` chunks with kN tiles of activations. loads: those of the chunk behind each of them; asks: for another chunk's weights, each time.
  template <i32 kN> DEVICE_MEMBER void multiply_chunks(i32 turns, bool asks, bool loads, float (&sum)[2][2][kTiles][kLaneSums]) {
    const bool mine = loads && matches(g, t);
    const u32 by = asks ? stream.step : 0, end = next.offset + Inputs::kStep * turns;
#pragma unroll 1
    while (next.offset != end) {           // no branches: one block of instructions, loads among products
      const Columns<kN> columns = columns_of<kN>(raw, g, t);
      next.load<kN>(raw, loads, mine);
      Scales scales[2];
      Words second;
      load_half(second, stream.stage + codes_at, 1);
      load_scales(scales[0], stream.stage + scales_at, 0);
      load_scales(scales[1], stream.stage + scales_at, 1);
      Products<kN> products;
      multiply(products, words, columns, 4 * lane);
      stream.advance(asks, by);
      load_half(words, stream.stage + codes_at, 0);
      add_products(products, scales[0], columns, sum[0]);
      multiply(products, second, columns, 4 * lane);
      add_products(products, scales[1], columns, sum[1]);
    }
  }
  DEVICE_MEMBER i32 turns_of(const Told& told) { return uniform((told.chunks - warp + kConsumers - 1) / kConsumers); }
  DEVICE_MEMBER i32 tiles_of(const Told& told) { return kTiles == 1 || uniform(told.item.count) <= kTilePairs ? 1 : kTiles; }
  // Weights for a turn at least.
  DEVICE_MEMBER void catch_up() {
    stream.catch_up();
    if (stream.begun) return;
    sync_warp();                           // other lanes' copies
    load_half(words, stream.stage + codes_at, 0);
    stream.begun = 1;
  }
  // Until the item at `place` can be begun; weights come before its activations are there.
  DEVICE_MEMBER void await(const Place<kItems>& place) {
    u64* ready = &group.ready[place.at()];
    if (is_over(ready, place.parity())) return;
    barrier_wait(&group.known[place.at()], place.parity());
    stream.fill(0);
    barrier_wait(ready, place.parity());
  }
  DEVICE_MEMBER void run(u32 stages) {
    stream.begin(stages);
#pragma unroll
    for (i32 n = 0; n < kTiles; ++n) raw[n] = {};
    Place<kItems> place = {0};
    i32 opened = 0;                        // 1: the item's first activations are loaded, and what follows is known
    i32 turns = 0, tiles = 0, readable = 1;   // of this warp, to go; of its activations; whether there is anything to multiply
    for (u32 sums_parity = 0;;) {
      if (!opened) {
        await(place);
        const Told& told = group.told[place.at()];
        const i32 chunks = uniform(told.chunks);
        if (chunks < 0) return;
        turns = turns_of(told), tiles = tiles_of(told), readable = chunks;
        next.open(told.codes, told.exponents, warp, g, t);
        next.load<kTiles>(raw, turns > 0, turns > 0 && matches(g, t));
      }
      if (warp == 0) barrier_arrive(&group.begun[place.number % 2]);   // all lanes: a branch that parts them costs the loops their uniform registers
      u64* heard = &group.heard[place.at()];
      ++place.number;
      opened = 0;
      i32 ahead = 0, tiles_ahead = 0;      // of the next item
      float sum[2][2][kTiles][kLaneSums] = {};
      while (turns > 0) {
        if (turns == 1 && is_over(&group.ready[place.at()], place.parity())) {
          const Told& told = group.told[place.at()];
          next.open(told.codes, told.exponents, warp, g, t);
          ahead = turns_of(told), tiles_ahead = tiles_of(told);
          opened = (ahead > 0) & (tiles_ahead <= tiles);
        }
        if (!stream.steady()) catch_up();
        bool asks;
        const i32 some = stream.plan_turns(turns > 1 ? turns - 1 : 1, asks);
        const bool loads = (turns > 1) | opened;
        if (kTiles == 1 || tiles == 1) multiply_chunks<1>(some, asks, loads, sum);
        else multiply_chunks<kTiles>(some, asks, loads, sum);
        turns -= some;
      }
      if (readable) {
        barrier_wait(&group.spare, sums_parity ^ 1);
        store_sums(group.sums[warp], kPitch, sum, tiles, lane);
        barrier_arrive(&group.summed);
        sums_parity ^= 1;
      }
      stream.open_next();                  // past this item, if it had no chunk for this warp
      barrier_arrive(heard);
      turns = ahead, tiles = tiles_ahead;
    }
  }
};

KERNEL_ALONE(mlp_small, MlpArgs, args, kThreads) {
  DYNAMIC_SHARED(memory);   // the groups, their stages, the table
  const Plan& plan = *args.layer.plan;
  auto* groups = reinterpret_cast<Group*>(memory);
  const i32 warp = uniform(thread_id() / 32), lane = thread_id() % 32;
  const bool dispatches = warp / kGroups == kConsumers;
  SHARED(Fixed, fixed);
  Fixed own = {};
  if (warp == kGroups * kConsumers) own = fixed_of(args);
  open_groups(groups);      // only threads of the block use them: no fence but the barrier
  if (kTable) fill_table(memory + (kTableAt - shared_address(memory)));
  if (thread_id() == 32 * kGroups * kConsumers) fixed = own;
  sync_block();
  if (!args.beside) wait_for_launch_before();
  const Vec4 head = load_vector(reinterpret_cast<const u8*>(&plan), 0);   // count, waves, misses, live_tokens
  if (dispatches) touch_plan(args, fixed.pairs, lane, groups[warp - kGroups * kConsumers].sums[0]);
  const i32 waves = static_cast<i32>(head.y), misses = static_cast<i32>(head.z);
  if (args.wave == 0 && waves == 0 && args.combines) {
    clear_outputs(args);
    return;
  }
  if (args.wave >= waves) return end_beside(args);
  if (misses) fetch_first(args);
  if (warp < kGroups * kConsumers) {
    if (kMovesRegisters) more_registers<104>();
    Group& group = groups[warp / kConsumers];
    const u32 stages = shared_address(memory) + kStreamAt + warp * Stream::kRing;
    const i32 number = warp % kConsumers, g = lane / 4, t = lane % 4;
    Consumer{args, group, number, lane, g, t, codes_of(g, t), scales_of(g, t), {group, number, lane, stages + Stream::kRing}, {}, {}, {}}.run(stages);
  } else if (warp < kGroups * (kConsumers + 1)) {
    if (kMovesRegisters) fewer_registers<32>();
    const i32 group = warp - kGroups * kConsumers;
    Dispatcher{args, groups[group], fixed, lane, !misses && !args.beside}.run(first_item(args, group));
    end_beside(args);
  } else {
    if (kMovesRegisters) fewer_registers<32>();
    Finisher{args, groups[warp - kGroups * (kConsumers + 1)], lane}.run();
  }
}
