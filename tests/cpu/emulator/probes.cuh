// Small kernels that test_emulator.py runs.
#pragma once
#include "../../../src/moet/kernels/gpu/gpu.cuh"

struct ProbeArgs {
  u32 *a, *b, *c;
  i64 n;
};

KERNEL(probe_sum, ProbeArgs, args, 1024) {
  struct Sums { u32 of[32]; };
  SHARED(Sums, sums);
  u32 v = args.a[block_id() * thread_count() + thread_id()];
  for (i32 m = 16; m; m /= 2) v += shuffle_xor(v, m);
  if (thread_id() % 32 == 0) sums.of[thread_id() / 32] = v;
  sync_block();
  if (thread_id() < 32) {
    v = thread_id() < thread_count() / 32 ? sums.of[thread_id()] : 0;
    for (i32 m = 16; m; m /= 2) v += shuffle_xor(v, m);
    if (thread_id() == 0) args.b[block_id()] = v;
  }
}

KERNEL(probe_transpose, ProbeArgs, args, 1024) {
  DYNAMIC_SHARED(memory);
  u32* tile = reinterpret_cast<u32*>(memory);
  const i32 t = thread_id();
  tile[t] = args.a[t];
  sync_block();
  args.b[t] = tile[t % 32 * 32 + t / 32];
}

// Block b waits for block b + 1; the last one begins.
KERNEL(probe_chain, ProbeArgs, args, 1024) {
  const i32 after = block_count() - block_id();   // 1 for the last block
  if (thread_id() == 0) {
    while (load_acquire_gpu(args.a + after - 1) + 1 != static_cast<u32>(after)) pause(10);
    store_release_gpu(args.a + after, static_cast<u32>(after));
  }
  sync_block();
}

KERNEL(probe_order, ProbeArgs, args, 1024) {
  if (thread_id() == 0) args.a[atomic_add_gpu(args.b, 1)] = static_cast<u32>(block_id());
}

KERNEL(probe_divergent, ProbeArgs, args, 1024) {
  args.a[thread_id()] = thread_id() % 2 ? ballot(true) : shuffle(1u, 0);
}

KERNEL(probe_early_exit, ProbeArgs, args, 1024) {
  if (thread_id() == 40) return;
  args.a[thread_id()] = ballot(true);
}

KERNEL(probe_half_warp, ProbeArgs, args, 1024) {
  if (thread_id() < 16) args.a[thread_id()] = ballot(true);
  sync_block();
}

KERNEL(probe_overflow, ProbeArgs, args, 1024) {
  DYNAMIC_SHARED(memory);
  memory[64] = static_cast<u8>(args.n);
}

// a: A, 16 rows of 8 words; b: B transposed, 8 columns of 8 words; c: D, 16 rows of 8 floats.
KERNEL(probe_mma, ProbeArgs, args, 32) {
  const i32 g = thread_id() / 4, t = thread_id() % 4;
  float* c = reinterpret_cast<float*>(args.c);
  const u32 a[4] = {args.a[g * 8 + t], args.a[(g + 8) * 8 + t], args.a[g * 8 + t + 4], args.a[(g + 8) * 8 + t + 4]};
  const u32 b[2] = {args.b[g * 8 + t], args.b[g * 8 + t + 4]};
  float d[4] = {c[g * 8 + 2 * t], c[g * 8 + 2 * t + 1], c[(g + 8) * 8 + 2 * t], c[(g + 8) * 8 + 2 * t + 1]};
  mma_bf16(d, a, b);
  c[g * 8 + 2 * t] = d[0], c[g * 8 + 2 * t + 1] = d[1], c[(g + 8) * 8 + 2 * t] = d[2], c[(g + 8) * 8 + 2 * t + 1] = d[3];
}

KERNEL(probe_multiply, ProbeArgs, args, 1024) {
  for (i64 i = thread_id(); i < args.n; i += thread_count()) args.c[i] = multiply_bf16x2(args.a[i], args.b[i]);
}

KERNEL(probe_bits, ProbeArgs, args, 32) {
  if (thread_id()) return;
  args.a[0] = permute_bytes(0x33221100u, 0x77665544u, 0x3210);
  args.a[1] = permute_bytes(0x33221100u, 0x77665544u, 0x7654);
  args.a[2] = permute_bytes(0x33221100u, 0x77665544u, 0x0457);
  args.a[3] = permute_bytes(0x80007f80u, 0u, 0x9b9b) & 0x00ff00ffu;
  args.a[4] = pack_bf16(1.0f, 2.0f);
  args.a[5] = pack_bf16(as_float(0x7fc00000u), as_float(0xff800001u));
  args.a[6] = pack_bf16(as_float(0xff800000u), as_float(0x7f7fffffu));
  args.a[7] = static_cast<u32>(popcount(0x80000f00u));
}
