// Activations as the small kernels multiply them, 64 bytes for 32 columns, by the format of the rows:
//   kPlanes  two planes of int8, high then low, and a power of two: (256 * high + low) * 2^exponent. The largest magnitude of a block takes 14 or 15 bits, so a value is
//            off by at most 2^-15 of it; a bf16 within 2^6 of the largest is exact
//   kHalves  float16 and the same power of two: rounded to 11 bits, which are exact for a bf16 within 2^30 of the largest
//   kBf16s   bf16
#pragma once
#include "args.cuh"

enum Numbers : i32 { kPlanes, kHalves, kBf16s };

constexpr i32 kLargest = 32639;                        // 256 * 127 + 127: both planes fit int8
constexpr i32 kSmallestPower = -97, kLargestPower = 54;   // of a block's largest value: beyond these magnitudes values are 0, or saturate. -97: tcq2's least scale, 2^-15, times it is a normal number

// Of a block's largest magnitude, as its bits: the power of two that the block's exponent goes by, and what multiplies values then.
// Of the largest plus its 128th: (2 - 2^-6) * 2^14 is below kLargest, and what is above goes to the next power.
DEVICE i32 power_of(u32 largest) {
  const i32 power = static_cast<i32>(as_bits(multiply(as_float(largest), 1.0078125f)) >> 23) - 127;
  return power < kSmallestPower ? kSmallestPower : power > kLargestPower ? kLargestPower : power;
}
DEVICE float factor_of(i32 power) { return as_float(static_cast<u32>(14 - power + 127) << 23); }
DEVICE i32 quantized(float value, float factor) {
  const i32 q = round_to_int(multiply(value, factor));
  return q > kLargest ? kLargest : q < -kLargest ? -kLargest : q;
}

DEVICE float halved(float value, float factor) {
  const float v = multiply(value, factor), most = static_cast<float>(kLargest);
  return v > most ? most : v < -most ? -most : v;
}

// One lane's value of a block of 32; false in all lanes: one of them is not finite (the block is then zeros).
template <i32 kNumbers> DEVICE bool quantize_block(float value, u8* codes, i32* exponent) {
  const i32 lane = thread_id() % 32;
  u32 largest = as_bits(value) & 0x7fffffffu;
#pragma unroll
  for (i32 i = 16; i; i /= 2) {
    const u32 other = shuffle_xor(largest, i);
    largest = other > largest ? other : largest;
  }
  const bool finite = largest < 0x7f800000u;
  const i32 power = power_of(finite ? largest : 0);
  if (kNumbers == kPlanes) {
    const i32 q = finite ? quantized(value, factor_of(power)) : 0, high = (q + 128) >> 8, low = q - 256 * high;
    codes[lane] = static_cast<u8>(high);
    codes[32 + lane] = static_cast<u8>(low);
  } else {
    const u32 number = !finite ? 0 : kNumbers == kHalves ? pack_half(halved(value, factor_of(power)), 0.0f) : pack_bf16(value, 0.0f);
    *reinterpret_cast<u16*>(codes + 2 * lane) = static_cast<u16>(number);
  }
  if (lane == 0) *exponent = (power - 14) * (1 << 23);
  return finite;
}

// The same of four blocks: a lane has columns 4 * (lane % 8) .. + 3 of block lane / 8, as bf16; codes and exponent are its block's, and written where `there`.
DEVICE bool quantize_four(Vec2 values, bool there, i32 numbers, u8* codes, i32* exponent) {
  const i32 part = thread_id() % 8;
  const u32 bits[4] = {values.x << 16, values.x & 0xffff0000u, values.y << 16, values.y & 0xffff0000u};
  u32 largest = 0;
#pragma unroll
  for (i32 i = 0; i < 4; ++i) largest = (bits[i] & 0x7fffffffu) > largest ? bits[i] & 0x7fffffffu : largest;
#pragma unroll
  for (i32 i = 4; i; i /= 2) {
    const u32 other = shuffle_xor(largest, i);
    largest = other > largest ? other : largest;
  }
  const bool finite = largest < 0x7f800000u;
  const i32 power = power_of(finite ? largest : 0);
  const float factor = factor_of(power);
  if (numbers == kPlanes) {
    u32 high = 0, low = 0;
#pragma unroll
    for (i32 i = 0; i < 4; ++i) {
      const i32 q = finite ? quantized(as_float(bits[i]), factor) : 0, top = (q + 128) >> 8;
      high |= (static_cast<u32>(top) & 0xff) << (8 * i), low |= (static_cast<u32>(q - 256 * top) & 0xff) << (8 * i);
    }
    if (there) *reinterpret_cast<u32*>(codes + 4 * part) = high, *reinterpret_cast<u32*>(codes + 32 + 4 * part) = low;
  } else {
    float v[4];
#pragma unroll
    for (i32 i = 0; i < 4; ++i) v[i] = finite ? halved(as_float(bits[i]), factor) : 0.0f;
    const Vec2 halves = {pack_half(v[0], v[1]), pack_half(v[2], v[3])}, own = finite ? values : Vec2{0, 0};
    if (there) *reinterpret_cast<Vec2*>(codes + 8 * part) = numbers == kHalves ? halves : own;
  }
  if (there && part == 0) *exponent = (power - 14) * (1 << 23);
  return finite;
}

// One warp of `warps`: its chunks of 128 columns of a token's x, two of them in one trip to memory. False: a value is not finite.
DEVICE bool quantize_chunks(const MlpArgs& a, i32 token, i32 warp, i32 warps) {
  constexpr i32 kAtOnce = 2;
  const i32 lane = thread_id() % 32, units = hidden_padded(a) / 4, chunks = (units + 31) / 32;
  const u16* x = a.x + static_cast<i64>(token) * a.hidden;
  const i64 row = static_cast<i64>(token) * (units / 8);
  bool finite = true;
#pragma unroll 1
  for (i32 from = warp; from < chunks; from += kAtOnce * warps) {
    Vec2 values[kAtOnce];
#pragma unroll
    for (i32 i = 0; i < kAtOnce; ++i) {
      const i32 column = 4 * (32 * (from + i * warps) + lane);
      values[i] = column < a.hidden ? *reinterpret_cast<const Vec2*>(x + column) : Vec2{0, 0};
    }
#pragma unroll
    for (i32 i = 0; i < kAtOnce; ++i) {
      const i32 chunk = from + i * warps, unit = 32 * chunk + lane;
      if (chunk >= chunks) break;
      const i64 at = row + unit / 8;
      finite &= quantize_four(values[i], unit < units, a.numbers, a.x_planes.codes + at * 64, a.x_planes.exponents + at);
    }
  }
  return finite;
}

// All threads of a block, number `part` of `parts`: its share of the tokens, up to four at a time; marks of their pairs are cleared.
DEVICE void quantize_tokens(const MlpArgs& a, i32 part, i32 parts) {
  struct Broken { u32 of[4]; };
  SHARED(Broken, broken);
  const i32 t = thread_id(), tokens = a.layer.tokens, each = (tokens + parts - 1) / parts, begin = part * each, end = begin + each < tokens ? begin + each : tokens;
  const i32 together = each < 2 || thread_count() < 64 ? 1 : each < 4 || thread_count() < 128 ? 2 : 4;
  const i32 warps = thread_count() / 32 / together, warp = t / 32 % warps, own = t / 32 / warps;   // of a token
  for (i32 i = begin * a.layer.top_k + t; i < end * a.layer.top_k; i += thread_count()) a.act_planes.broken[i] = 0;
  for (i32 from = begin; from < end; from += together) {
    if (t < together) broken.of[t] = 0;
    sync_block();
    if (own < together && from + own < end && !quantize_chunks(a, from + own, warp, warps)) broken.of[own] = 1;
    sync_block();
    if (t < together && from + t < end) a.x_planes.broken[from + t] = broken.of[t];
    if (from + together < end) sync_block();
  }
}
