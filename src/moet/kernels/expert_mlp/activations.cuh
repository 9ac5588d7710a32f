// Activations of 32 columns as two planes of int8 and a power of two: value = (256 * high + low) * 2^exponent. The largest magnitude of a block takes 14 or 15
// bits, so a value is off by at most 2^-15 of it; a bf16 within 2^6 of the largest is exact. The float64 oracle is integers.py's quantize.
#pragma once
#include "args.cuh"

constexpr i32 kLargest = 32639;                        // 256 * 127 + 127: both planes fit int8
constexpr i32 kSmallestPower = -97, kLargestPower = 54;   // of a block's largest value: beyond these magnitudes values are 0, or saturate. -97: tcq2's least scale, 2^-15, times it is a normal number

struct PlaneBlock {
  i32 exponent;            // << 23, to be added to the bits of a float32 scale
  i32 sum, first;          // of the 32 integers 256 * high + low, and of the first 16
  i32 reserved;
};

// One lane's value of a block of 32; false in all lanes: one of them is not finite (the block is then zeros).
DEVICE bool quantize_block(float value, u8* codes, PlaneBlock* block) {
  const i32 lane = thread_id() % 32;
  u32 largest = as_bits(value) & 0x7fffffffu;
#pragma unroll
  for (i32 i = 16; i; i /= 2) {
    const u32 other = shuffle_xor(largest, i);
    largest = other > largest ? other : largest;
  }
  const bool finite = largest < 0x7f800000u;
  // Of the largest plus its 128th: (2 - 2^-6) * 2^14 is below kLargest, and what is above goes to the next power.
  i32 power = static_cast<i32>(as_bits(multiply(as_float(finite ? largest : 0), 1.0078125f)) >> 23) - 127;
  power = power < kSmallestPower ? kSmallestPower : power > kLargestPower ? kLargestPower : power;
  i32 q = finite ? round_to_int(multiply(value, as_float(static_cast<u32>(14 - power + 127) << 23))) : 0;
  q = q > kLargest ? kLargest : q < -kLargest ? -kLargest : q;
  const i32 high = (q + 128) >> 8, low = q - 256 * high;
  codes[lane] = static_cast<u8>(high);
  codes[32 + lane] = static_cast<u8>(low);
  i32 sum = q;
#pragma unroll
  for (i32 i = 1; i < 16; i *= 2) sum += shuffle_xor(sum, i);
  const i32 other = shuffle_xor(sum, 16);
  if (lane == 0) *block = {(power - 14) * (1 << 23), sum + other, sum, 0};
  return finite;
}

// All threads of a block: one token's x; marks of its pairs are cleared.
DEVICE void quantize_token(const MlpArgs& a, i32 token) {
  SHARED(u32, broken);
  const i32 warps = thread_count() / 32, lane = thread_id() % 32, blocks = hidden_padded(a) / 32;
  const u16* x = a.x + static_cast<i64>(token) * a.hidden;
  if (thread_id() == 0) broken = 0;
  sync_block();
  for (i32 b = thread_id() / 32; b < blocks; b += warps) {
    const i32 column = 32 * b + lane;
    const i64 at = static_cast<i64>(token) * blocks + b;
    const float value = column < a.hidden ? as_float(static_cast<u32>(x[column]) << 16) : 0.0f;
    if (!quantize_block(value, a.x_planes.codes + at * 64, a.x_planes.blocks + at) && lane == 0) broken = 1;
  }
  for (i32 k = thread_id(); k < a.layer.top_k; k += thread_count()) a.act_planes.broken[token * a.layer.top_k + k] = 0;
  sync_block();
  if (thread_id() == 0) a.x_planes.broken[token] = broken;
}
