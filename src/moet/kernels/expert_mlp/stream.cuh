// A consumer's weights on their way through shared memory, chunk after chunk, across the ends of items. A stage is a chunk: two blocks along K, which in w13 lie behind
// each other and in w2 a stride apart. Lanes copy 16 bytes at a time: nine to twelve instructions, where asking the copy engine for each piece takes forty, and engine
// and feeding warp are a bottleneck of their own (docs/kernels.md).
#pragma once
#include "group.cuh"

constexpr i32 kPiece = 2 * kBlockBytes, kMostStages = 6;
constexpr i32 kStreamAt = kGroups * static_cast<i32>(sizeof(Group));
constexpr i32 kForStages = kSharedLimit - kStreamAt - kTableBytes - (kTable ? 1024 : 0), kFit = kForStages / (kGroups * kConsumers * kPiece);
constexpr i32 kStages = kFit < kMostStages ? kFit : kMostStages;
constexpr i32 kStreamEnd = kStreamAt + kGroups * kConsumers * kStages * kPiece;
constexpr i32 kSharedBytes = kTable ? kTableAt + kTableBytes - kSystemBytes : kStreamEnd;
static_assert(kStages >= 2 && kSharedBytes <= kSharedLimit && (!kTable || kStreamEnd + kSystemBytes + 256 <= kTableAt));

// Half a warp copies a block: its lane l units l, 16 + l, 32 + l, ... of 16 bytes, so that one address and constants do.
struct Stream {
  static constexpr i32 kUnits = kBlockBytes / 16, kCopies = (kUnits + 15) / 16, kRest = kUnits % 16;   // units of a block; copies of a chunk by a lane; of the last one
  static constexpr i32 kRing = kStages * kPiece;

  const MlpArgs& args;
  Group& group;
  const i32 warp, lane;
  const u32 end;                           // of the warp's stages, a shared address
  u32 stage;                               // the one that is being read, or the last one that was; those that are asked for are behind it
  i32 under_way;                           // of these
  bool late;                               // some were asked for between turns: groups of copies are not turns
  Place<kItems> place;                     // the item that is asked for next, below 0: there is none
  i32 left;                                // blocks from the next chunk to the end of the item's strip
  const u8* at;                            // the lane's first unit of the next chunk
  i32 step;                                // to the one after it

  DEVICE_MEMBER void begin(u32 stages) {
    stage = stages + kRing - kPiece, under_way = 0, late = false, left = 0, place = {0, 0};
  }
  DEVICE_MEMBER void open_strip(const Told& told) {
    const i32 stride = told.stride;
    left = told.blocks - 2 * warp;
    at = told.strip + ((2 * warp + lane / 16) * stride + 16 * (lane % 16));
    step = 2 * kConsumers * stride;
  }
  DEVICE_MEMBER void copy_chunk(u32 to, bool there) {
    to += lane / 16 * kBlockBytes + 16 * (lane % 16);
#pragma unroll
    for (i32 i = 0; i < kCopies; ++i) copy_async16_if(there && (i < kUnits / 16 || lane % 16 < kRest), to + 256 * i, at + 256 * i);
    commit_copies();
    at += there ? step : 0;
  }
  // To the next item that is known. All lanes. False: there is none.
  DEVICE_MEMBER bool open_next() {
    while (left <= 0) {
      if (place.at < 0 || !is_over(&group.known[place.at], place.parity)) return false;
      const Told& told = group.told[place.at];
      place.advance();
      if (told.item.kind == kNothingLeft) place.at = -1;
      else if (told.readable) open_strip(told);
    }
    return true;
  }
  // For the next chunk, of which it is known where it lies.
  DEVICE_MEMBER void ask() {
    if (left == 1 && lane >= 16) at -= step / (2 * kConsumers);   // a last block without a neighbour: itself again, against zeros
    const u32 to = stage + (1 + under_way) * kPiece;
    copy_chunk(to >= end ? to - kRing : to, true);
    left -= 2 * kConsumers, ++under_way, late = true;
  }
  // Asks for what there is, until all stages but one are under way and it is known what comes behind them. needed: that many at least, which will be known.
  DEVICE_MEMBER void fill(i32 needed) {
    while (under_way < kStages - 1 || left <= 0) {
      if (open_next()) {
        if (under_way < kStages - 1) ask();
      } else if (under_way >= needed) {
        return;
      }
    }
  }
  // How many of `turns` can be taken, and asked for, as usual: all stages but one are under way, and the item that is asked for goes on. 0: none.
  DEVICE_MEMBER i32 steady(i32 turns) const {
    const i32 most = (left + 2 * kConsumers - 2) / (2 * kConsumers);
    return late || under_way < kStages - 1 || most <= 0 ? 0 : turns < most ? turns : most;
  }
  // Where there are none: at least the next one can be taken then. What was asked for late is waited for.
  DEVICE_MEMBER void catch_up() {
    fill(1);
    if (late) wait_copies<0>(), late = false;
  }
  // `turns` will be taken, with or without asking for others.
  DEVICE_MEMBER void plan_turns(i32 turns, bool asks) {
    if (asks) left -= 2 * kConsumers * turns;
    else under_way -= turns;
  }
  // The next stage, as soon as it is there: its shared address. A chunk is asked for in the place of the stage before. Every turn is a group of copies, of none at last.
  DEVICE_MEMBER u32 take(bool asks) {
    wait_copies<kStages - 2>();
    sync_warp();                           // other lanes' copies; and they are done with the stage before
    copy_chunk(stage, asks);
    const u32 next = stage + kPiece;
    return stage = next == end ? end - kRing : next;
  }
};
