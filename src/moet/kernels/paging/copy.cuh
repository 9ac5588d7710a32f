// Bytes of a row from pinned RAM into a slot.
#pragma once
#include "state.cuh"

constexpr i32 kInFlight = 8;   // loads of 16 bytes a thread before its first store: 64 KiB a block of 512, the link's latency times its rate with two blocks

// Whole 16-byte words, by all threads. Coherent loads: the CPU may overwrite the row meanwhile, and whoever asks for the copy finds that out afterwards.
DEVICE void copy_bytes(u8* to, const u8* from, i64 bytes) {
  const i64 stride = 16ll * thread_count();
  for (i64 at = 16ll * thread_id(); at < bytes; at += kInFlight * stride) {
    Vec4 v[kInFlight];
#pragma unroll
    for (i32 i = 0; i < kInFlight; ++i)
      if (at + i * stride < bytes) v[i] = load_coherent(from + at + i * stride);
#pragma unroll
    for (i32 i = 0; i < kInFlight; ++i)
      if (at + i * stride < bytes) store16(to + at + i * stride, v[i]);
  }
}

// Where a location says that the row lies; the row is there only if `in_arena`.
DEVICE bool in_arena(u64 location) {
  const u32 slot = static_cast<u32>(location);
  return slot != 0 && slot != kFailedLocation;
}
DEVICE const u8* source_of(const SlotClass& c, u64 location) { return c.arena + (static_cast<i64>(static_cast<u32>(location)) - 1) * c.slot_bytes; }
// The read for this request, or for a later one of the same row, went wrong.
DEVICE bool read_failed(u64 location, u32 request) {
  return static_cast<u32>(location) == kFailedLocation && static_cast<i32>(static_cast<u32>(location >> 32) - request) >= 0;
}
