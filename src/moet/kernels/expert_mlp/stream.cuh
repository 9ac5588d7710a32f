// A consumer's weights on their way through shared memory, chunk after chunk, across the ends of items. A stage is a chunk: two blocks along K, which in w13 lie behind
// each other and in w2 a stride apart. Lanes copy 16 bytes at a time: nine to twelve instructions, where asking the copy engine for each piece takes forty, and engine
// and feeding warp are a bottleneck of their own (docs/kernels.md).
#pragma once
#include "group.cuh"

// What stages take, the L1 cache loses, and activations fall out of it (mxfp4 on an H200, 8 tokens: 99 us with six stages, 98 with four, 97 with three).
constexpr i32 kPiece = 2 * kBlockBytes, kMostStages = 3;
constexpr i32 kStreamAt = kGroups * static_cast<i32>(sizeof(Group));
constexpr i32 kForStages = kSharedLimit - kStreamAt - kTableBytes - (kTable ? 1024 : 0), kFit = kForStages / (kGroups * kConsumers * kPiece);
constexpr i32 kStages = kFit < kMostStages ? kFit : kMostStages;
constexpr i32 kStreamEnd = kStreamAt + kGroups * kConsumers * kStages * kPiece;
constexpr i32 kSharedBytes = kTable ? kTableAt + kTableBytes - kSystemBytes : kStreamEnd;
static_assert(kStages >= 2 && kSharedBytes <= kSharedLimit && (!kTable || kStreamEnd + kSystemBytes + 256 <= kTableAt));

// Half a warp copies a block: its lane l a unit of 16 bytes of each step, and one of the scales, so that one address and constants do.
struct Stream {
  static constexpr i32 kRest = kFormat == kFp8Row ? 0 : kScaleBytes / 16, kCopies = kBits + (kRest > 0);   // units of a block's scales; copies of a chunk by a lane: its steps, and these
  static constexpr i32 kRing = kStages * kPiece;

  Group& group;
  const i32 warp, lane;
  const u32 end;                           // of the warp's stages, a shared address
  u32 lane_at[kBits / kEach];              // in a stage, the lane's unit of each kEach-th step
  u32 stage;                               // of the chunk that is next to be multiplied; behind it those that are asked for after it
  i32 under_way;                           // chunks that are asked for, this one included
  i32 late;                                // some were asked for between turns: groups of copies are not turns
  i32 begun;                               // not 0: the first words of the chunk are in registers
  Place<kItems> place;                     // the item that is asked for next
  i32 more;                                // there is one
  i32 left;                                // whole chunks of the strip that are still to be asked for
  i32 half;                                // 1: and a last one of one block
  const u8* at;                            // the lane's first unit of the warp's first chunk
  u32 offset, step;                        // of the next one; to the one after it

  DEVICE_MEMBER void begin(u32 stages) {
    stage = stages, under_way = late = begun = half = left = 0, more = 1, place = {0};
#pragma unroll
    for (i32 s = 0; s < kBits / kEach; ++s) lane_at[s] = lane / 16 * kBlockBytes + swizzled(kEach * s, lane % 16);
  }
  DEVICE_MEMBER void open_strip(const Told& told) {
    const i32 stride = uniform(told.stride), blocks = uniform(told.blocks), mine = (blocks - 2 * warp + 2 * kConsumers - 1) / (2 * kConsumers);
    half = blocks & 1 & (((blocks / 2 - warp) % kConsumers == 0) & (mine > 0));
    left = (mine > 0 ? mine : 0) - half;
    at = told.strip + ((2 * warp + lane / 16) * stride + 16 * (lane % 16));
    offset = 0, step = static_cast<u32>(2 * kConsumers * stride);
  }
  DEVICE_MEMBER void copy_chunk(u32 to, bool there, u32 by) {
    const u8* from = further(at, offset);
#pragma unroll
    for (i32 i = 0; i < kCopies; ++i)
      copy_async16_if(there && (i < kBits || lane % 16 < kRest), to + (i < kBits ? lane_at[i / kEach] + 256 * (i % kEach) : lane_at[0] + kCodeBytes), from + 256 * i);
    commit_copies();
    offset += by;
  }
  // To the next item that is known. All lanes. False: there is none.
  DEVICE_MEMBER bool open_next() {
    while (!left && !half) {
      if (!more || !is_over(&group.known[place.at()], place.parity())) return false;
      const Told& told = group.told[place.at()];
      ++place.number;
      const i32 chunks = uniform(told.chunks);
      if (chunks < 0) more = 0;
      else if (chunks > 0) open_strip(told);
    }
    return true;
  }
  // For the next chunk, of which it is known where it lies.
  DEVICE_MEMBER void ask() {
    const bool last = !left;
    if (last && lane >= 16) at -= step / (2 * kConsumers);   // a last block without a neighbour: itself again, against zeros
    const u32 to = stage + under_way * kPiece;
    copy_chunk(to >= end ? to - kRing : to, true, step);
    if (last) half = 0;
    else --left;
    ++under_way, late = 1;
  }
  // Asks for what there is, until all stages are under way and it is known what comes behind them. needed: that many at least, which will be known.
  DEVICE_MEMBER void fill(i32 needed) {
    while (under_way < kStages || !left) {
      if (open_next()) {
        if (under_way == kStages) return;
        ask();
      } else if (under_way >= needed) {
        return;
      }
    }
  }
  // Whether turns can be taken, and others asked for, as usual: all stages are under way, and the strip that is asked for goes on.
  DEVICE_MEMBER bool steady() const { return !late & (under_way == kStages) & (left > 0); }
  // Where they cannot: at least the next one can be taken then. What was asked for late is waited for.
  DEVICE_MEMBER void catch_up() {
    fill(1);
    if (late) wait_copies<0>(), late = 0;
  }
  // How many of at most `turns` will be taken; asks: another one is asked for each time. Nothing is late.
  DEVICE_MEMBER i32 plan_turns(i32 turns, bool& asks) {
    const i32 some = under_way < kStages ? 0 : left < turns ? left : turns;
    asks = some;
    left -= some, under_way -= !asks, begun = under_way;
    return asks ? some : 1;
  }
  // To the next stage, as soon as it is there. A chunk is asked for in the place of the one before, which all lanes have read. Every turn is a group of copies, of none at last.
  // by: the step, if it asks.
  DEVICE_MEMBER void advance(bool asks, u32 by) {
    wait_copies<kStages - 2>();
    sync_warp();                           // other lanes' copies; and they are done with this stage
    copy_chunk(stage, asks, by);
    const u32 next = stage + kPiece;
    stage = next == end ? end - kRing : next;
  }
};
