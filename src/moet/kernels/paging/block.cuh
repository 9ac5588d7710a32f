// Sums and minima over the threads of a block. A caller that uses the same shared memory again puts a barrier in between.
#pragma once
#include "../gpu/gpu.cuh"

struct PerWarp { u64 of[32]; };

DEVICE u64 warp_prefix(u64 v) {   // inclusive
  const i32 lane = thread_id() % 32;
#pragma unroll
  for (i32 by = 1; by < 32; by *= 2) {
    const u64 before = shuffle_up(v, by);
    if (lane >= by) v += before;
  }
  return v;
}

// The sum of v over the threads before this one; `sum` is that of all. One barrier.
DEVICE u64 block_prefix(PerWarp& warps, u64 v, u64& sum) {
  const i32 lane = thread_id() % 32, warp = thread_id() / 32;
  const u64 inclusive = warp_prefix(v);
  if (lane == 31) warps.of[warp] = inclusive;
  sync_block();
  const u64 all = warp_prefix(lane < thread_count() / 32 ? warps.of[lane] : 0);
  sum = shuffle(all, 31);
  const u64 before = shuffle(all, warp ? warp - 1 : 0);
  return (warp ? before : 0) + inclusive - v;
}

DEVICE u64 warp_minimum(u64 v) {
#pragma unroll
  for (i32 by = 16; by; by /= 2) {
    const u64 other = shuffle_xor(v, by);
    v = other < v ? other : v;
  }
  return v;
}

// The smallest v of the block, in every thread. One barrier.
DEVICE u64 block_minimum(PerWarp& warps, u64 v) {
  const i32 lane = thread_id() % 32;
  v = warp_minimum(v);
  if (lane == 0) warps.of[thread_id() / 32] = v;
  sync_block();
  return warp_minimum(lane < thread_count() / 32 ? warps.of[lane] : ~0ull);
}
