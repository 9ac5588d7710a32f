// The expert MLP for few tokens an expert (decoding), a wave in one launch: gate and up with their activation, down, and the sum over places. Bound by reading the
// weights; docs/kernels.md has the counts.
//
// Four warps are a group: they take an item (queue.cuh), a strip of 64 rows and up to 4 or 8 pairs, split K, and add their sums in the order of the warps. The
// groups of a block share a table and nothing else, so that one reads while another one adds up. A down item waits for its step's tiles of w13; these were
// handed out before it, and whoever has them runs. The group that finishes a strip of the hidden columns, of all steps, adds up the places there.
#pragma once
#include "combine.cuh"
#include "queue.cuh"
#if FORMAT == 3 || FORMAT == 4 || FORMAT == 5
#include "small_bf16.cuh"
#else
#include "small_integer.cuh"
#endif

constexpr i32 kGroupWarps = 4, kGroupThreads = 32 * kGroupWarps;

template <i32 kN> struct Group {                  // in shared memory
  static constexpr i32 kPairs = kN * kTilePairs, kPitch = kPairs + 1;   // odd: lanes at one pair hit 32 banks
  Item item[2];
  i32 readable, last;
  float sums[kGroupWarps][64 * kPitch];
};

// A warp's place in the strip of an item.
struct Reader {
  const u8* at;                                   // the first block of the chunk that is loaded next
  u32 stride;                                     // between blocks
  i32 chunk, chunks, blocks;
};
DEVICE Reader open_reader(const Strip& strip, i32 warp) {
  return {strip.at + 2 * warp * strip.stride, static_cast<u32>(strip.stride), warp, (strip.blocks + 1) / 2, strip.blocks};
}
DEVICE void load_next(Reader& r, Weights& w, i32 g, i32 t) {
  if (r.chunk >= r.chunks) return;
  load_weights(w, r.at, 2 * r.chunk + 1 < r.blocks ? r.stride : 0, g, t);   // past the end: any weights, against zeros
  r.at += static_cast<i64>(2 * kGroupWarps) * r.stride, r.chunk += kGroupWarps;
}

template <i32 kN> struct Kernel {
  const MlpArgs& args;
  Group<kN>& shared;
  const i32 group, thread, warp, lane, g, t;

  DEVICE_MEMBER const u8* row_at(const Item& item) { return args.layer.slots->pool + item.slot * args.layer.slots->slot_bytes; }
  DEVICE_MEMBER Strip strip_of(const Item& item) {
    const u8* row = row_at(item);
    return item.kind == kGateUp ? w13_strip(args, row, item.strip) : w2_strip(args, row, item.strip);
  }
  DEVICE_MEMBER void sync() { sync_group(group, kGroupThreads); }

  // Thread 0: until an item's weights and activations are there. False: the row cannot be read.
  DEVICE_MEMBER bool await(const Item& item, u64& waited) {
    const Plan& plan = *args.layer.plan;
    if (item.kind == kGateUp) return args.fetchers ? await_row(args.layer, item.step, args.fetchers, waited) : !row_failed(plan, item.step);
    while (load_acquire_gpu(&plan.made[item.step]) != static_cast<u32>(item.parts)) pause(20);
    return !row_failed(plan, item.step);
  }

  DEVICE_MEMBER void store_sums(const float (&sum)[2][2][kN][kValues]) {
#pragma unroll
    for (i32 half = 0; half < 2; ++half)
#pragma unroll
      for (i32 i = 0; i < 2; ++i)
#pragma unroll
        for (i32 n = 0; n < kN; ++n)
#pragma unroll
          for (i32 q = 0; q < kValues; ++q) {
            constexpr i32 kOfRow = kValues / 2;
            shared.sums[warp][(32 * half + 4 * g + 2 * i + q / kOfRow) * Group<kN>::kPitch + kTilePairs * n + kOfRow * t + q % kOfRow] = sum[half][i][n][q];
          }
  }
  DEVICE_MEMBER float total(i32 row, i32 pair) {
    float v = 0.0f;
#pragma unroll
    for (i32 w = 0; w < kGroupWarps; ++w) v = add(v, shared.sums[w][row * Group<kN>::kPitch + pair]);
    return multiply(v, kAfter);
  }

  // A warp takes a pair, a lane a value of the tile.
  DEVICE_MEMBER void finish_gate_up(const Item& item) {
    const u8* row = row_at(item);
    const Strip strip = strip_of(item);
    const bool there = 32 * (args.tile_begin + item.strip) + lane < args.inter;
    for (i32 pair = warp; pair < item.count; pair += kGroupWarps) {
      const i32 position = item.position + pair;
      const float gate = fused_multiply_add(total(lane, pair), multiplier(args, row, 0), tile_bias(args, strip, 0, lane));
      const float up = fused_multiply_add(total(32 + lane, pair), multiplier(args, row, 1), tile_bias(args, strip, 1, lane));
      const bool broken = broken_input(args, true, args.layer.plan->pairs[position], position);
      store_act(args, position, item.strip, broken ? not_a_number() : there ? activate(args, gate, up) : 0.0f);
    }
  }
  DEVICE_MEMBER void finish_down(const Item& item, bool lost) {
    const u8* row = row_at(item);
    for (i32 i = thread; i < 64 * item.count; i += kGroupThreads) {
      const i32 pair = i / 64, n = i % 64, column = 64 * item.strip + n, position = item.position + pair;
      if (column >= args.hidden) continue;
      float v = 0.0f;
      if (!lost) v = fused_multiply_add(total(n, pair), multiplier(args, row, 2), down_bias(args, row, column));
      if (!lost && broken_input(args, false, 0, position)) v = not_a_number();
      args.y[static_cast<i64>(args.layer.plan->pairs[position]) * args.hidden + column] = to_bf16(v);
    }
  }
  // All threads, after a barrier behind finish_down: whoever comes last combines.
  DEVICE_MEMBER void combine_strip(const Item& item) {
    Plan& plan = *args.layer.plan;
    if (!args.combines || args.wave != plan.waves - 1) return;
    if (thread == 0) {
      fence_gpu();
      shared.last = atomic_add_gpu(&plan.finished[item.strip], 1) + 1 == static_cast<u32>(item.tiles);
    }
    sync();
    if (!shared.last) return;
    const i32 columns = args.hidden - 64 * item.strip < 64 ? args.hidden - 64 * item.strip : 64, groups = columns / 8;
    for (i32 i = thread; i < args.layer.tokens * groups; i += kGroupThreads) combine_columns(args, i / groups, 8 * item.strip + i % groups);
  }

  DEVICE_MEMBER void run(u8* table) {
    Plan& plan = *args.layer.plan;
    u32* counter = &plan.item[0][args.wave];
    Queue queue = open_queue(args);
    u64 waited = 0;
    if (warp == 0) {
      u32 ticket = 0;
      if (lane == 0) ticket = draw_gpu(counter);
      locate(args, queue, static_cast<i32>(shuffle(ticket, 0)), Group<kN>::kPairs, shared.item[0]);
    }
    sync();
    Weights weights[kAhead];
    Reader reader = {};
    const auto load = [&](const Item& item) {
      reader = open_reader(strip_of(item), warp);
#pragma unroll
      for (i32 i = 0; i < kAhead; ++i) load_next(reader, weights[i], g, t);
    };
    const Item begin = held(shared.item[0]);
    if (begin.kind != kNothingLeft && begin.hit) load(begin);
    if (kTable) {
      fill_table(table);
      sync_block();
    }
    for (i32 turn = 0;; turn ^= 1) {
      const Item item = held(shared.item[turn]);
      if (item.kind == kNothingLeft) break;
      u32 ticket = 0;
      if (thread == 0) ticket = draw_gpu(counter);
      bool readable = true;
      if (item.kind == kDown || !item.hit) {
        if (thread == 0) shared.readable = await(item, waited);
        sync();
        readable = uniform(shared.readable);
      }
      if (readable) {
        if (!item.hit) load(item);
        Inputs<kN> inputs;
        inputs.open(args, item.kind == kGateUp, plan.pairs, item.position, item.count, g, t);
        float sum[2][2][kN][kValues] = {};
        for (i32 chunk = warp; chunk < reader.chunks; chunk += kAhead * kGroupWarps)
#pragma unroll
          for (i32 i = 0; i < kAhead; ++i) {
            if (chunk + i * kGroupWarps >= reader.chunks) break;
            multiply_weights<kN>(weights[i], inputs, chunk + i * kGroupWarps, g, t, sum);
            load_next(reader, weights[i], g, t);
          }
        store_sums(sum);
      }
      if (warp == 0) locate(args, queue, static_cast<i32>(shuffle(ticket, 0)), Group<kN>::kPairs, shared.item[turn ^ 1]);
      sync();
      const Item next = held(shared.item[turn ^ 1]);
      if (next.kind != kNothingLeft && next.hit) load(next);
      if (item.kind == kGateUp && readable) finish_gate_up(item);
      if (item.kind == kDown) finish_down(item, !readable);
      sync();
      if (item.kind == kDown) combine_strip(item);
      else if (thread == 0) {
        fence_gpu();
        atomic_add_gpu(&plan.made[item.step], 1);
      }
    }
    if (args.fetchers) count_stall(args.layer, args.wave, waited);
  }
};

// Nothing routes anywhere: the output is zeros. All blocks.
DEVICE void clear_outputs(const MlpArgs& a) {
  const i32 groups = a.hidden / 8;
  for (i32 i = block_id() * thread_count() + thread_id(); i < a.layer.tokens * groups; i += block_count() * thread_count()) combine_columns(a, i / groups, i % groups);
}

template <i32 kN> DEVICE void run_small(const MlpArgs& args) {
  DYNAMIC_SHARED(memory);   // the table, then the groups'
  auto* groups = reinterpret_cast<Group<kN>*>(memory + kTableBytes);
  const Plan& plan = *args.layer.plan;
  if (args.wave == 0 && plan.waves == 0 && args.combines) return clear_outputs(args);
  if (args.wave >= plan.waves) return;
  fetch_first(args);
  const i32 group = uniform(thread_id() / kGroupThreads), thread = thread_id() % kGroupThreads, lane = thread % 32;
  Kernel<kN>{args, groups[group], group, thread, uniform(thread / 32), lane, lane / 4, lane % 4}.run(memory);
}

// Up to 4 or 8 pairs a tile, and four times as many where experts have them.
KERNEL(mlp_small, MlpArgs, args, 512) { run_small<1>(args); }
KERNEL(mlp_medium, MlpArgs, args, 256) { run_small<4>(args); }
