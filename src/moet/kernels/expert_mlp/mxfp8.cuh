// MXFP8 activations (OCP Microscaling Formats v1.0): E4M3 codes, and a UE8M0 scale for 32 columns, the smallest power of two at which none of them saturates.
// A block that is not finite has the scale 255, NaN.
#pragma once
#include "mlp.cuh"
#include "scaled_weights.cuh"

// Rows of activations: codes [rows, stride], scales [rows, stride / 32]. Inside a block of 32 columns, codes stand in the order of the weights' fragments.
struct Mxfp8 {
  u8 *codes, *scales;
  i64 stride;              // whole stages of 128 columns
};
DEVICE Mxfp8 mxfp8_rows(void* memory, i32 rows, i32 columns) {
  const i64 stride = (columns + 127) / 128 * 128;
  u8* codes = static_cast<u8*>(memory);
  return {codes, codes + rows * stride, stride};
}
// Where bf16 or planes of them would be: x by token, the values between the GEMMs by position in Plan.pairs.
DEVICE Mxfp8 x_mxfp8(const MlpArgs& a) { return mxfp8_rows(a.x_large, a.layer.tokens, a.hidden); }
DEVICE Mxfp8 act_mxfp8(const MlpArgs& a) { return mxfp8_rows(a.act, a.layer.tokens * a.layer.top_k, 32 * a.tiles); }

// Bits of the largest magnitude of a block, which order as the values do, NaN above infinity. Eight lanes have four values each: every lanes-th of the warp's.
template <i32 lanes> DEVICE u32 largest_bits(const float (&v)[4]) {
  u32 most = 0;
#pragma unroll
  for (i32 e = 0; e < 4; ++e) {
    const u32 magnitude = as_bits(v[e]) & 0x7fffffffu;
    most = most > magnitude ? most : magnitude;
  }
#pragma unroll
  for (i32 by = lanes; by < 8 * lanes; by *= 2) {
    const u32 other = shuffle_xor(most, by);
    most = most > other ? most : other;
  }
  return most;
}
// most: of a block. 1.75 * 2^8 is E4M3's largest number.
DEVICE u32 mx_scale(u32 most) {
  const u32 exponent = (most + 0x1fffffu) >> 23;
  return most >= 0x7f800000u ? 255 : exponent > 8 ? exponent - 8 : 0;
}
// Eight lanes have a block: g = 0 .. 7 its columns 4g .. 4g + 3. most: of all of them.
DEVICE void store_mxfp8(const Mxfp8& to, i64 row, i32 block, i32 g, const float (&v)[4], u32 most) {
  const u32 scale = mx_scale(most);
  const float inverse = as_float((254 - scale) << 23);   // 255: whatever
  float c[4];
#pragma unroll
  for (i32 e = 0; e < 4; ++e) c[e] = multiply(v[e], inverse);
  u8* codes = to.codes + row * to.stride + 32 * block + code_position(g);
  constexpr i32 second = kBits == 8 ? 1 : 2;   // of the first pair
  *reinterpret_cast<u16*>(codes) = static_cast<u16>(pack_e4m3(c[0], c[second]));
  *reinterpret_cast<u16*>(codes + kPairsApart) = static_cast<u16>(pack_e4m3(c[second ^ 3], c[3]));
  if (g == 0) to.scales[row * (to.stride / 32) + block] = static_cast<u8>(scale == 255 ? 255 : scale + kCodeShift);
}

// x of all rows, tokens or not. Columns past the hidden size are zeros.
KERNEL(quantize_x, MlpArgs, args, 256) {
  const Mxfp8 to = x_mxfp8(args);
  const i32 g = thread_id() % 8, blocks = static_cast<i32>(to.stride / 32);
  const i64 total = static_cast<i64>(args.layer.tokens) * blocks, step = static_cast<i64>(block_count()) * thread_count() / 8;
  for (i64 first = (static_cast<i64>(block_id()) * thread_count() + thread_id() / 32 * 32) / 8; first < total; first += step) {   // the same for a warp
    const i64 item = first + thread_id() % 32 / 8;
    const i64 row = item / blocks;
    const i32 block = static_cast<i32>(item % blocks), column = 32 * block + 4 * g;
    float v[4] = {};
    if (item < total && column < args.hidden) {
      const u32* p = reinterpret_cast<const u32*>(args.x + row * args.hidden + column);   // hidden is a multiple of 8
      const u32 words[2] = {p[0], p[1]};
#pragma unroll
      for (i32 e = 0; e < 4; ++e) v[e] = as_float(e & 1 ? words[e >> 1] & 0xffff0000u : words[e >> 1] << 16);
    }
    const u32 most = largest_bits<1>(v);
    if (item < total) store_mxfp8(to, row, block, g, v, most);
  }
}
