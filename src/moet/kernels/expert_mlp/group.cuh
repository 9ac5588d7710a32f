// What the warps of a group of mlp_small share (small.cuh): the items that they work on, their sums, and the barriers between them.
#pragma once
#include "../gpu/hopper.cuh"
#include "queue.cuh"

constexpr bool kMovesRegisters = MOET_ARCH == 90 && kBits <= 4;   // setmaxnreg
constexpr i32 kSharedLimit = (MOET_ARCH == 80 ? 163 << 10 : MOET_ARCH == 90 || MOET_ARCH == 100 ? 227 << 10 : 99 << 10) - 256;   // of a block, beside its variables
// Of six warps each: 24 warps of 80 registers before they move, 18 of 96. Stages of 8- and 16-bit rows are large, and what they do for a byte is little: few warps,
// with three stages each where more would have two (FP8 on an H200, 8 tokens: 170 us with two groups, 177 with four).
constexpr i32 kGroups = kBits == 16 && kSharedLimit < 128 << 10 ? 1 : kBits >= 8 ? 2 : kMovesRegisters ? 4 : 3;
constexpr i32 kItems = 4;

// An item as the dispatcher tells it; consumers add their own offsets.
struct Told {
  Item item;
  i32 chunks;              // of 64 columns, along K; 0: its row cannot be read, and nobody multiplies; below 0: there is no item
  i32 blocks;              // of 32 that there are
  i32 stride;              // between them
  const u8 *row, *strip;   // strip: its first block
  const u8 *codes[kPairs], *exponents[kPairs];   // of its pairs, rows of the activations it reads; past the last pair the first one's
  const u32* broken[kPairs];
  i32 pair[kPairs];    // token * top_k + place
};
struct Group {             // in shared memory
  u64 known[kItems], ready[kItems], heard[kItems];   // of `told`: its row is there, so are its activations; all are done with it
  u64 begun[2];                            // every other item
  u64 summed, spare;                       // of `sums`: the consumers have stored an item's; the finisher has read them
  Told told[kItems];
  float sums[kConsumers][64 * kPitch];
};
static_assert(sizeof(Group) % 16 == 0);

// Number of something that takes the places of a ring of n in turn, and the parity of its turn.
template <i32 n> struct Place {
  static_assert((n & (n - 1)) == 0);
  u32 number;
  DEVICE_MEMBER u32 at() const { return number % n; }
  DEVICE_MEMBER u32 parity() const { return number / n % 2; }
};

// All threads, before the block meets: three barriers of a warp. Lanes that initialise one each take turns, 40 clocks each. Whoever wrote or read what a barrier stands for
// arrives itself, all lanes of a warp: so tools that look for races see it, too.
DEVICE void open_groups(Group* groups) {
  constexpr i32 kEach = 3 * kItems + 4;
  if (thread_id() % 32) return;
#pragma unroll 1
  for (i32 i = thread_id() / 32; i < kGroups * kEach; i += thread_count() / 32) {
    Group& g = groups[i / kEach];
    const i32 k = i % kEach, at = k % kItems;
    u64* own = k < kItems ? &g.known[at] : k < 2 * kItems ? &g.ready[at] : k < 3 * kItems ? &g.heard[at] : at < 2 ? &g.begun[at] : at == 2 ? &g.summed : &g.spare;
    barrier_init(own, 32 * (k == kEach - 2 ? kConsumers : own == &g.heard[at] ? kConsumers + 1 : 1));
  }
}
DEVICE bool is_over(u64* barrier, u32 parity) { return !ballot(!barrier_test(barrier, parity)); }   // the same for all lanes
