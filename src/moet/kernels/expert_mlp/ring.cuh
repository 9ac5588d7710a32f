// A warp's chunks of weights on their way through shared memory: it asks for chunks ahead, in the order in which it takes them. From sm_90 on one lane asks the
// copy engine, which costs no registers, two instructions a piece, and no place in the queue of the warp's own loads; before, every lane copies 16 bytes at a time.
#pragma once
#include "../gpu/hopper.cuh"
#include "weights.cuh"

constexpr bool kBulk = MOET_ARCH >= 90;
constexpr i32 kSharedLimit = MOET_ARCH == 80 ? 163 << 10 : MOET_ARCH == 90 || MOET_ARCH == 100 ? 227 << 10 : 99 << 10;   // of a block

// A stage is a chunk: two blocks, in pieces. Eight lanes that load 16 bytes each take a step's 32, of four steps or of two steps of both blocks: 32 bytes more
// behind each piece of 256 put them into different banks.
constexpr i32 kPiece = 256 + 32, kPieces = kBits;                   // of a block; the last piece has the scales, too
constexpr i32 kBlockStage = kBits == 2 ? 704 : (kPieces - 1) * kPiece + 256 + kScaleBytes;
constexpr i32 kLastPiece = 256 + kScaleBytes;
constexpr i32 kStage = kBlockStage + (kPieces - 1) * kPiece + kLastPiece;
static_assert(kBits > 4 || (kStage % 16 == 0 && (kBits == 4 || kBlockStage % 128 == 64)));

template <i32 kStages> struct Ring {
  u8* memory;                // the dynamic shared memory
  u32 stages, full;          // where in it kStages * kStage bytes and kStages barriers are
  u32 asked, taken;          // chunks
  i32 lane;

  DEVICE_MEMBER u64* barrier(u32 place) const { return reinterpret_cast<u64*>(memory + full) + place; }
  // All lanes. Nobody else uses these bytes.
  DEVICE_MEMBER void open() {
    asked = taken = 0;
    if (!kBulk) return;
    if (lane < kStages) barrier_init(barrier(lane), 1);
    barriers_ready();
    sync_warp();
  }
  DEVICE_MEMBER bool full_up() const { return asked - taken == kStages; }
  // The chunk whose first block is at `at`, the second one `stride` bytes on.
  DEVICE_MEMBER void ask(const u8* at, u32 stride) {
    const u32 place = asked++ % kStages;
    u8* to = memory + stages + place * kStage;
    if (kBulk) {
      if (lane == 0) {
        barrier_expect(barrier(place), 2 * kBlockBytes);
#pragma unroll
        for (i32 b = 0; b < 2; ++b)
#pragma unroll
          for (i32 p = 0; p < kPieces; ++p) bulk_copy(to + b * kBlockStage + p * kPiece, at + b * stride + p * 256, p == kPieces - 1 ? kLastPiece : 256, barrier(place));
      }
      return;
    }
    for (i32 i = lane; i < 2 * kBlockBytes / 16; i += 32) {
      const i32 b = i >= kBlockBytes / 16, inside = i - b * (kBlockBytes / 16), p = inside / 16 < kPieces ? inside / 16 : kPieces - 1;
      copy_async16(to + b * kBlockStage + p * (kPiece - 256) + 16 * inside, at + b * stride + 16 * inside);
    }
    commit_copies();
  }
  // Where the oldest chunk is, once it is there.
  DEVICE_MEMBER u32 take() const {
    const u32 place = taken % kStages;
    if (kBulk) {
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
