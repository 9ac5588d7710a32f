// What the warps of a group of mlp_small share (small_streamed.cuh): the items that they work on, their sums, and the barriers between them.
#pragma once
#include "../gpu/hopper.cuh"
#include "queue.cuh"

constexpr bool kMovesRegisters = MOET_ARCH == 90;         // setmaxnreg
constexpr i32 kSharedLimit = (MOET_ARCH == 80 ? 163 << 10 : MOET_ARCH == 90 || MOET_ARCH == 100 ? 227 << 10 : 99 << 10) - 256;   // of a block, beside its variables
constexpr i32 kConsumers = 4;                             // warps of a group
constexpr i32 kGroups = kMovesRegisters ? 4 : 3;          // six warps each: 24 warps of 80 registers before they move, 18 of 96
constexpr i32 kItems = 4, kMostPairs = 4;

// An item as the dispatcher tells it; consumers add their own offsets.
struct Told {
  Item item;
  i32 readable;            // 0: its row cannot be read, and nobody multiplies
  i32 chunks, blocks;      // along K: of 64 columns, and of 32 that there are
  i32 stride;              // between blocks
  const u8 *row, *strip;   // strip: its first block
  const u8 *codes[kMostPairs], *sums[kMostPairs];   // of its pairs, rows of the planes it reads; past the last pair the first one's
  const u32* broken[kMostPairs];
  i32 pair[kMostPairs];    // token * top_k + place
};
struct Group {             // in shared memory
  u64 known[kItems], ready[kItems], heard[kItems];   // of `told`: its row is there, so are its activations; all are done with it
  u64 begun[2];                            // every other item; the dispatcher draws the one after the next one then, not earlier: other groups may be faster
  u64 summed, spare;                       // of `sums`: the consumers have stored an item's; the finisher has read them
  Told told[kItems];
  float sums[kConsumers][64 * kPitch];
};
static_assert(sizeof(Group) % 16 == 0 && kPairs <= kMostPairs);

// A place in a ring of n, and the parity of its turn.
template <i32 n> struct Place {
  i32 at;
  u32 parity;
  DEVICE_MEMBER void advance() {
    if (++at == n) at = 0, parity ^= 1;
  }
};

// One thread. Whoever wrote or read what a barrier stands for arrives itself, all lanes of a warp: so tools that look for races see it, too.
DEVICE void open_group(Group& group) {
  for (i32 i = 0; i < kItems; ++i) barrier_init(&group.known[i], 32), barrier_init(&group.ready[i], 32), barrier_init(&group.heard[i], 32 * (kConsumers + 1));
  for (i32 i = 0; i < 2; ++i) barrier_init(&group.begun[i], 1);
  barrier_init(&group.summed, 32 * kConsumers);
  barrier_init(&group.spare, 32);
}
DEVICE bool is_over(u64* barrier, u32 parity) { return !ballot(!barrier_test(barrier, parity)); }   // the same for all lanes
