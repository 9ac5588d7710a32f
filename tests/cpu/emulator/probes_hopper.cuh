// Small kernels that test_emulator_hopper.py runs.
#pragma once
#include "../../../src/moet/kernels/gpu/hopper.cuh"

struct HopperProbe {
  const u16* a;   // [64][64]
  const u16* b;   // [16 * units][64]
  float* d;       // [64][16 * units]
  i32 units, broken;   // broken: 1: registers of A are written before the product is waited for; 2: D is read before
};

// D += A x B, twice: the second time with A's rows backwards, while the first product is under way.
KERNEL_ALONE(probe_products, HopperProbe, args, 128) {
  DYNAMIC_SHARED(memory);
  u8* tile = align_shared(memory);
  const i32 warp = thread_id() / 32, g = thread_id() % 32 / 4, t = thread_id() % 4, n = 16 * args.units;
  for (i32 i = thread_id(); i < n * 8; i += 128) copy_async16(tile + i / 8 * 128 + (i % 8 ^ (i / 8 & 7)) * 16, args.b + 8 * i);
  commit_copies();
  wait_copies<0>();
  fence_async_shared();
  sync_block();
  float d[64] = {};
  u32 a[2][16];
#pragma unroll
  for (i32 turn = 0; turn < 2; ++turn)
#pragma unroll
    for (i32 s = 0; s < 4; ++s)
#pragma unroll
      for (i32 i = 0; i < 4; ++i) {
        const i32 row = 16 * warp + g + 8 * (i & 1), k = 16 * s + 2 * t + 8 * (i >> 1);
        a[turn][4 * s + i] = *reinterpret_cast<const u32*>(args.a + (turn ? 63 - row : row) * 64 + k);
      }
  multiply_tile<4>(d, a[0], tile_descriptor(tile), args.units, false);
  if (args.broken == 1) a[0][0] = 0;
  multiply_tile<4>(d, a[1], tile_descriptor(tile), args.units, true);
  if (args.broken != 2) products_wait<0>();
#pragma unroll
  for (i32 i = 0; i < 64; ++i) {
    const i32 row = 16 * warp + g + 8 * (i >> 1 & 1), column = 8 * (i >> 2) + 2 * t + (i & 1);
    if (column < n) args.d[row * n + column] = d[i];
  }
  products_wait<0>();
}

// One thread brings a row of 32 bytes, 16 as a bulk copy and 16 as its own stores; the others wait for both, twice.
KERNEL_ALONE(probe_barrier, HopperProbe, args, 64) {
  struct Shared { alignas(16) u16 row[16]; u64 barrier; };
  SHARED(Shared, s);
  if (thread_id() == 0) barrier_init(&s.barrier, 1 + args.broken), barriers_ready();
  sync_block();
  for (i32 turn = 0; turn < 2; ++turn) {
    if (thread_id() == 0) {
      for (i32 i = 0; i < 8; ++i) s.row[8 + i] = args.a[16 * turn + 8 + i];
      barrier_expect(&s.barrier, 16);
      bulk_copy(s.row, args.a + 16 * turn, 16, &s.barrier);
    }
    barrier_wait(&s.barrier, turn);
    if (thread_id() >= 32 && thread_id() < 48) args.d[16 * turn + thread_id() - 32] = as_float(static_cast<u32>(s.row[thread_id() - 32]) << 16);
    sync_block();
  }
}

// Two words at once, from an address that 8 divides, or does not.
KERNEL_ALONE(probe_two_words, HopperProbe, args, 32) {
  struct Shared { alignas(8) u32 word[4]; };
  SHARED(Shared, s);
  if (thread_id() < 4) s.word[thread_id()] = static_cast<u32>(10 + thread_id());
  sync_block();
  u32 a, b;
  load_two_words_by<8>(shared_at(s.word) + 4 * args.broken, a, b);
  u16* const to = reinterpret_cast<u16*>(args.d);
  store_word_if(thread_id() == 0, to, 2, a);
  store_word_if(thread_id() == 0, to, 0, b);
  store_word_if(thread_id() > 31, to, 4, a);
}
