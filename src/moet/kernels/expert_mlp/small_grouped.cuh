// The expert MLP for few tokens an expert, for rows of 8 and 16 bits: a wave in one launch, gate and up with their activation, down, and the sum over places, as in
// small_streamed.cuh, with bf16 products and without roles: rows are four to seven times as large, and what a warp has to do for a byte is little.
//
// Four warps are a group: they take an item (queue.cuh), a strip of 64 rows and up to 8 pairs, split K, and add their sums in the order of the warps. The groups of
// a block share nothing, so that one reads while another one adds up. A down item waits for its step's tiles of w13; these were handed out before it, and whoever
// has them runs. The group that finishes a strip of the hidden columns, of all steps, adds up the places there.
#pragma once
#include "combine.cuh"
#include "queue.cuh"
#include "small_bf16.cuh"

constexpr i32 kGroups = 4, kGroupWarps = 4, kGroupThreads = 32 * kGroupWarps;

struct Group {                                    // in shared memory
  Item item[4];                                   // the one that is computed, the next one, and the one that is being looked for, in turn
  i32 readable, last, reserved[2];
  float sums[kGroupWarps][64 * kPitch];
};
constexpr i32 kSharedBytes = kGroups * static_cast<i32>(sizeof(Group));

// A warp's place in the strip of an item.
struct Reader {
  const u8* at;                                   // the first block of the chunk that is asked for next
  i64 stride;                                     // between blocks
  i32 left;                                       // blocks from there to the end of the strip
};

struct Kernel {
  const MlpArgs& args;
  Group& shared;
  const i32 group, thread, warp, lane, g, t;      // thread, warp: of the group
  LoadedChunk weights;
  Reader reader;

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

  DEVICE_MEMBER float total(i32 row, i32 pair) {
    float v = 0.0f;
#pragma unroll
    for (i32 w = 0; w < kGroupWarps; ++w) v = add(v, shared.sums[w][row * kPitch + pair]);
    return v;
  }

  // What the end of an item needs from memory: loaded before the products, which take longer than it. A warp takes pairs of gate and up, lanes the tile's values; of
  // down it takes halves of pairs, lanes 32 of the strip's columns.
  static constexpr i32 kOwn = kPairs / kGroupWarps, kOwnHalves = 2 * kOwn;
  struct End {
    float first, second, bias[2];   // multipliers; of gate and up, or of both halves
    i32 pair[kOwnHalves];
  };
  DEVICE_MEMBER i32 half_of(i32 i) { return (warp + kGroupWarps * i) % 2; }
  DEVICE_MEMBER i32 pair_of(bool gate_up, i32 i) { return gate_up ? warp + kGroupWarps * i : (warp + kGroupWarps * i) / 2; }
  DEVICE_MEMBER void load_end(End& e, const Item& item) {
    const bool gate_up = item.kind == kGateUp;
    const u8* row = row_at(item);
    e.first = multiplier(args, row, gate_up ? 0 : 2), e.second = multiplier(args, row, 1);
    const Strip strip = strip_of(item);
    for (i32 i = 0; i < 2; ++i) {
      const i32 column = 64 * item.strip + lane + 32 * i;
      e.bias[i] = gate_up ? tile_bias(args, strip, i, lane) : column < args.hidden ? down_bias(args, row, column) : 0.0f;
    }
#pragma unroll
    for (i32 i = 0; i < kOwnHalves; ++i) {
      const i32 pair = pair_of(gate_up, i);
      e.pair[i] = args.layer.plan->pairs[item.position + (pair < item.count ? pair : 0)];
    }
  }
  DEVICE_MEMBER void finish_gate_up(const Item& item, const End& e) {
    const bool there = 32 * (args.tile_begin + item.strip) + lane < args.inter;
#pragma unroll
    for (i32 i = 0; i < kOwn; ++i) {
      const i32 pair = pair_of(true, i);
      if (pair >= item.count) break;
      const float gate = fused_multiply_add(total(lane, pair), e.first, e.bias[0]), up = fused_multiply_add(total(32 + lane, pair), e.second, e.bias[1]);
      store_act(args, item.position + pair, item.strip, there ? activate(args, gate, up) : 0.0f);
    }
  }
  DEVICE_MEMBER void finish_down(const Item& item, const End& e, bool lost) {
#pragma unroll
    for (i32 i = 0; i < kOwnHalves; ++i) {
      const i32 pair = pair_of(false, i), column = 64 * item.strip + 32 * half_of(i) + lane;
      if (pair >= item.count) break;
      if (column >= args.hidden) continue;
      const float v = lost ? 0.0f : fused_multiply_add(total(32 * half_of(i) + lane, pair), e.first, half_of(i) ? e.bias[1] : e.bias[0]);
      args.y[static_cast<i64>(e.pair[i]) * args.hidden + column] = to_bf16(v);
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
    combine_tokens(args, item.strip, thread, kGroupThreads);
  }

  DEVICE_MEMBER bool items_are_few() { return args.layer.tokens * args.layer.top_k * args.tiles < 2 * kGroups * block_count(); }
  DEVICE_MEMBER void open_reader(const Item& item) {
    const Strip strip = strip_of(item);
    reader = {strip.at + static_cast<i64>(2 * warp) * strip.stride, strip.stride, strip.blocks - 2 * warp};
  }
  // A chunk of the item that the reader is in, if it has one; `next`: else of the next item, if its row is there.
  DEVICE_MEMBER void ask(const Item* next, bool& ahead) {
    if (weights.there) return;
    if (reader.left <= 0) {
      if (!next || ahead || uniform(next->kind) == kNothingLeft || !uniform(next->hit)) return;
      ahead = true;
      open_reader(held(*next));
      if (reader.left <= 0) return;
    }
    weights.ask(reader.at, reader.stride, reader.left, g, t);
    reader.at += static_cast<i64>(2 * kGroupWarps) * reader.stride, reader.left -= 2 * kGroupWarps;
  }

  // All chunks of an item for this warp; the sums are in shared memory then.
  DEVICE_MEMBER void multiply_item(const Item& item, const Item& next, bool& ahead) {
    const i32 chunks = item.kind == kGateUp ? hidden_padded(args) / 64 : (args.tiles + 1) / 2;
    Inputs inputs;
    inputs.open(args, item.kind == kGateUp, args.layer.plan->pairs, item.position, item.count, g);
    float sum[2][2][1][4] = {};
    u32 loaded[2][1][4][2];                       // of a chunk and of this warp's next one
    const auto load = [&](i32 chunk, i32 c) { inputs.load(loaded[c], chunk < chunks ? chunk : chunks - 1, t); };   // no branch: it would wait for the loads
    for (i32 c = 0; c < 2; ++c) load(warp + kGroupWarps * c, c);
    for (i32 first = warp; first < chunks; first += 2 * kGroupWarps) {
#pragma unroll
      for (i32 c = 0; c < 2; ++c) {
        const i32 chunk = first + kGroupWarps * c;
        if (chunk < chunks) {
#pragma unroll
          for (i32 half = 0; half < 2; ++half) accumulate<1>(weights.half[half], loaded[c], sum[half]);
          load(chunk + 2 * kGroupWarps, c);
          weights.there = false;
          ask(&next, ahead);
        }
      }
    }
    store_sums(shared.sums[warp], sum, g, t);
  }

  DEVICE_MEMBER void run() {
    Plan& plan = *args.layer.plan;
    u32* counter = &plan.item[2][args.wave];
    Queue queue = open_queue(args);
    u64 waited = 0;
    weights.there = false;
    reader = {};
    // The groups of a block draw one after the other: few items then go to all multiprocessors, and not four to each of the first ones.
    if (group && items_are_few()) pause(250 * group);
    if (warp == 0) {
      for (i32 i = 0; i < 2; ++i) {
        u32 ticket = 0;
        if (lane == 0) ticket = draw_gpu(counter);
        locate(args, queue, static_cast<i32>(shuffle(ticket, 0)), kPairs, shared.item[i]);
      }
    }
    sync();
    bool ahead = true;                            // the reader is in the next item, seen from the one before the first
    const Item first = held(shared.item[0]);
    if (first.kind != kNothingLeft && first.hit) open_reader(first), ask(nullptr, ahead);
    else ahead = false;
    for (i32 turn = 0;; turn = (turn + 1) % 4) {
      const Item item = held(shared.item[turn]);
      if (item.kind == kNothingLeft) break;
      const Item& next = shared.item[(turn + 1) % 4];
      u32 ticket = 0;
      if (thread == 0) ticket = draw_gpu(counter);
      bool readable = true;
      End end;
      if (item.kind == kDown || !item.hit) {
        if (thread == 0) shared.readable = await(item, waited);
        sync();
        readable = uniform(shared.readable);
      }
      load_end(end, item);
      if (readable) {
        if (!ahead) open_reader(item);
        ahead = false;
        ask(&next, ahead);                        // what the item before had no room for
        multiply_item(item, next, ahead);
      }
      if (warp == 0) locate(args, queue, static_cast<i32>(shuffle(ticket, 0)), kPairs, shared.item[(turn + 2) % 4]);
      sync();
      if (item.kind == kGateUp && readable) finish_gate_up(item, end);
      if (item.kind == kDown) finish_down(item, end, !readable);
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

KERNEL(mlp_small, MlpArgs, args, kGroups * kGroupThreads) {
  DYNAMIC_SHARED(memory);   // the groups
  const Plan& plan = *args.layer.plan;
  if (!args.beside) wait_for_launch_before();
  if (args.wave == 0 && plan.waves == 0 && args.combines) {
    clear_outputs(args);
    return;
  }
  if (args.wave >= plan.waves) return end_beside(args);
  fetch_first(args);
  const i32 group = uniform(thread_id() / kGroupThreads), thread = thread_id() % kGroupThreads, lane = thread % 32;
  auto* groups = reinterpret_cast<Group*>(memory);
  Kernel{args, groups[group], group, thread, uniform(thread / 32), lane, lane / 4, lane % 4, {}, {}}.run();
  end_beside(args);
}
