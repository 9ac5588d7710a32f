// A warp's weights on their way through shared memory: it asks for stages ahead, in the order in which it takes them. From sm_90 on one lane asks the copy engine,
// which costs no registers and no place in the queue of the warp's own loads; before, every lane copies 16 bytes at a time.
#pragma once
#include "../gpu/hopper.cuh"
#include "weights.cuh"

constexpr bool kBulk = MOET_ARCH >= 90;
constexpr i32 kSharedLimit = MOET_ARCH == 80 ? 163 << 10 : MOET_ARCH == 90 || MOET_ARCH == 100 ? 227 << 10 : 99 << 10;   // of a block

// A stage is one or two chunks, blocks along K: in w13 they lie behind each other and are one copy, in w2 a stride apart. Asking for a copy takes ten instructions.
constexpr i32 kStageChunks = kBits == 2 ? 2 : 1, kStageBlocks = 2 * kStageChunks, kStage = kStageBlocks * kBlockBytes;

template <i32 kStages> struct Ring {
  u8* memory;                // the dynamic shared memory
  u32 stages, full;          // where in it kStages * kStage bytes and kStages barriers are
  u32 asked, taken;          // stages
  i32 lane;

  DEVICE_MEMBER u64* barrier(u32 place) const { return reinterpret_cast<u64*>(memory + full) + place; }
  // All lanes. Nobody else uses these bytes.
  DEVICE_MEMBER void open() {
    asked = taken = 0;
    if constexpr (kBulk) {
      if (lane < kStages) barrier_init(barrier(lane), 1);
      barriers_ready();
      sync_warp();
    }
  }
  DEVICE_MEMBER bool full_up() const { return asked - taken == kStages; }
  // What other blocks wrote, and this one has waited for, comes before the copies.
  DEVICE_MEMBER void after_waiting() const {
    if constexpr (kBulk) fence_async();
  }
  // `blocks` blocks, at least one, `stride` bytes apart. The second block of a chunk that has but one: any weights.
  DEVICE_MEMBER void ask(const u8* at, u32 stride, i32 blocks) {
    const u32 place = asked++ % kStages;
    u8* to = memory + stages + place * kStage;
    blocks = blocks < kStageBlocks ? blocks : kStageBlocks;
    if constexpr (kBulk) {
      if (elected()) {
        const i32 whole = (blocks + 1) & ~1;
        barrier_expect(barrier(place), whole * kBlockBytes);
        if (stride == kBlockBytes) bulk_copy(to, at, whole * kBlockBytes, barrier(place));
        else
#pragma unroll 1
          for (i32 b = 0; b < whole; ++b) bulk_copy(to + b * kBlockBytes, at + static_cast<i64>(b < blocks ? b : blocks - 1) * stride, kBlockBytes, barrier(place));
      }
    } else {
      for (i32 i = lane; i < ((blocks + 1) & ~1) * (kBlockBytes / 16); i += 32) {
        const i32 b = i / (kBlockBytes / 16), inside = i % (kBlockBytes / 16);
        copy_async16(to + 16 * i, at + static_cast<i64>(b < blocks ? b : blocks - 1) * stride + 16 * inside);
      }
      commit_copies();
    }
  }
  // Where the oldest stage is, once it is there.
  DEVICE_MEMBER u32 take() const {
    const u32 place = taken % kStages;
    if constexpr (kBulk) {
      barrier_wait(barrier(place), taken / kStages & 1);
    } else {
      if (full_up()) wait_copies<kStages - 1>();
      else wait_copies<0>();
      sync_warp();
    }
    return stages + place * kStage;
  }
  // After the last lane has read it.
  DEVICE_MEMBER void give_back() {
    ++taken;
    sync_warp();
  }
};
