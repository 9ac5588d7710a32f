// Reads every byte once and keeps nothing: what memory gives a kernel that only reads.
#pragma once
#include "../../src/moet/kernels/gpu/gpu.cuh"

struct ReadArgs {
  const u8* data;   // 16-byte aligned
  i64 vectors;      // of 16 bytes
  u32* never;       // becomes 1 if a thread's words add up to 2^32 - 1, so that the loads stay
};

constexpr i32 kReadAhead = 8;

// A block reads whole pieces, kReadAhead vectors a thread, one behind the other in memory; blocks take them in turn.
KERNEL(read_bytes, ReadArgs, args, 1024) {
  const Vec4* data = reinterpret_cast<const Vec4*>(args.data);
  const i64 piece = static_cast<i64>(kReadAhead) * thread_count();
  u32 mixed = 1;
  for (i64 at = block_id() * piece; at < args.vectors; at += block_count() * piece) {
    Vec4 v[kReadAhead];
#pragma unroll
    for (i32 k = 0; k < kReadAhead; ++k) {
      const i64 i = at + k * thread_count() + thread_id();
      v[k] = i < args.vectors ? data[i] : Vec4{0, 0, 0, 0};
    }
#pragma unroll
    for (i32 k = 0; k < kReadAhead; ++k) mixed += v[k].x ^ v[k].y ^ v[k].z ^ v[k].w;
  }
  if (mixed == 0) *args.never = 1;
}
