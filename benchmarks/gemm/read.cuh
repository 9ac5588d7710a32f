// Reads every byte once and keeps nothing: what memory gives a kernel that only reads.
#pragma once
#include "../../src/moet/kernels/gpu/gpu.cuh"

struct ReadArgs {
  const u8* data;   // 16-byte aligned
  i64 vectors;      // of 16 bytes
  u32* never;       // becomes 1 if a thread's words add up to 2^32 - 1, so that the loads stay
};

constexpr i32 kReadAhead = 8;

KERNEL(read_bytes, ReadArgs, args, 512) {
  const Vec4* data = reinterpret_cast<const Vec4*>(args.data);
  const i64 step = static_cast<i64>(block_count()) * thread_count();
  u32 mixed = 1;
  for (i64 i = static_cast<i64>(block_id()) * thread_count() + thread_id(); i < args.vectors; i += kReadAhead * step) {
    Vec4 v[kReadAhead];
#pragma unroll
    for (i32 k = 0; k < kReadAhead; ++k) v[k] = i + k * step < args.vectors ? data[i + k * step] : Vec4{0, 0, 0, 0};
#pragma unroll
    for (i32 k = 0; k < kReadAhead; ++k) mixed += v[k].x ^ v[k].y ^ v[k].z ^ v[k].w;
  }
  if (mixed == 0) *args.never = 1;
}
