// Codes of a row (docs/row-format.md) to the A fragments of mma.m16n8k16, for the formats whose levels are floats: fp8 and fp8_row as float16, bf16 as it is.
// 32 columns of a row and of activations make a float32 sum; scales come after it, fp8_row's of a row behind all of them (finish.cuh).
//
// A warp takes a chunk: a strip's 64 rows x 64 columns, as two halves of 32 rows. Lane (g, t) = (lane / 4, lane % 4) has columns 8t .. 8t + 7 of both blocks of rows
// 4g .. 4g + 3: of each block kEach steps, 16 bytes at a time. Fragment i (0, 1): its row g is row 4g + 2i of the half, its row g + 8 is row 4g + 2i + 1.
// The eight columns of a product are eight pairs; lane t has the sums of pairs 2t and 2t + 1.
#pragma once
#include "activations.cuh"
#include "weights.cuh"

constexpr bool kTable = false;
constexpr i32 kTableBytes = 0, kTableAt = 0, kSystemBytes = 0;
DEVICE void fill_table(u8*) {}

constexpr i32 kNumbers = kBits == 8 ? kHalves : kBf16s;
constexpr i32 kParts = kBits == 8 ? 2 : 1;               // sums of a chunk's row, each with its scale: of both blocks, or together
constexpr i32 kLaneSums = 4;                             // of a lane, fragment and tile: two rows x two pairs
// What sums are multiplied by in the end: E4M3's bits, moved, are a float16 of 2^-8 the value.
constexpr float kAfter = kBits == 8 ? 256.0f : 1.0f;

// What a lane holds of one half of a chunk: the words of its 4 rows, step after step; FP8's scales of both blocks' granules.
struct Words { Vec4 of[2 * kEach]; };
struct Scales { u32 of[2]; };
// Where a lane's codes and scales are in a chunk, in bytes; of either half 0.
DEVICE u32 codes_of(i32 g, i32 t) { return swizzled(kEach * t, g); }
DEVICE u32 scales_of(i32, i32) { return kCodeBytes; }
// From their shared addresses.
DEVICE void load_half(Words& w, u32 codes, i32 half) {
#pragma unroll
  for (i32 i = 0; i < 2 * kEach; ++i) w.of[i] = load_shared16(codes + i / kEach * kBlockBytes + 256 * (i % kEach) + 128 * half);
}
DEVICE void load_scales(Scales& s, u32 scales, i32 half) {
#pragma unroll
  for (i32 b = 0; b < 2; ++b)
    if (kFormat == kFp8) s.of[b] = load_shared(scales + b * kBlockBytes + 4 * half);
}
// Four codes of FP8, as float16 of 2^-8 their values: codes 0 and 2, 1 and 3.
DEVICE void halves_of(u32 codes, u32& even, u32& odd) {
  even = select_bits(0x80008000u, codes << 8, codes << 7) & 0xbf80bf80u;
  odd = select_bits(0x80008000u, codes, codes >> 1) & 0xbf80bf80u;
}

// --- activations

// What a lane loads of a chunk: columns 8t .. of both blocks of pair g; of pairs 2t and 2t + 1 the blocks' exponents.
struct Raw {
  Vec4 bytes[2];
  u32 exponent[2][2];
};
DEVICE bool matches(i32, i32) { return true; }

// What products take of the activations of a chunk, and what comes behind them: other registers than those that the next ones are loaded into.
template <i32 kN> struct Columns {
  u32 b[8];                  // two registers for each product
  float power[2][2];
};
template <i32 kN> DEVICE Columns<kN> columns_of(const Raw* raw, i32, i32) {
  Columns<kN> c;
#pragma unroll
  for (i32 b = 0; b < 2; ++b) {
    const Vec4& v = raw->bytes[b];
    if (kBits == 8) {   // columns 0 and 2, 1 and 3, as codes come out of a word
      c.b[4 * b] = permute_bytes(v.x, v.y, 0x5410), c.b[4 * b + 1] = permute_bytes(v.x, v.y, 0x7632);
      c.b[4 * b + 2] = permute_bytes(v.z, v.w, 0x5410), c.b[4 * b + 3] = permute_bytes(v.z, v.w, 0x7632);
    } else {
      c.b[4 * b] = v.x, c.b[4 * b + 1] = v.y, c.b[4 * b + 2] = v.z, c.b[4 * b + 3] = v.w;
    }
#pragma unroll
    for (i32 q = 0; q < 2; ++q) c.power[q][b] = kBits == 8 ? as_float((127u << 23) + raw->exponent[q][b]) : 1.0f;
  }
  return c;
}
// The sums of half a chunk's weights x the columns, of fragment i and part.
template <i32 kN> struct Products { float of[2][kParts][4]; };
template <i32 kN> DEVICE void multiply(Products<kN>& d, const Words& words, const Columns<kN>& c, u32) {
#pragma unroll
  for (i32 i = 0; i < 2; ++i) {
#pragma unroll
    for (i32 p = 0; p < kParts; ++p)
#pragma unroll
      for (i32 q = 0; q < 4; ++q) d.of[i][p][q] = 0.0f;
#pragma unroll
    for (i32 m = 0; m < 4; ++m) {   // products: two of a block
      u32 a[4];
      if constexpr (kBits == 8) {
        halves_of(word_of(words.of[m], 2 * i), a[0], a[2]);
        halves_of(word_of(words.of[m], 2 * i + 1), a[1], a[3]);
        mma_f16(d.of[i][m / 2], a, {c.b[2 * m], c.b[2 * m + 1]});
      } else {
#pragma unroll
        for (i32 r = 0; r < 4; ++r) a[r] = word_of(words.of[2 * m + r / 2], 2 * i + r % 2);
        mma_bf16(d.of[i][0], a, {c.b[2 * m], c.b[2 * m + 1]});
      }
    }
  }
}
// sum[i][0][2 r + q] += them with their scales: row 4g + 2i + r of the half, pair 2t + q.
template <i32 kN, i32 kMost> DEVICE void add_products(const Products<kN>& d, const Scales& scales, const Columns<kN>& c, float (&sum)[2][kMost][kLaneSums]) {
#pragma unroll
  for (i32 p = 0; p < kParts; ++p)
#pragma unroll
    for (i32 q = 0; q < 2; ++q) {
      const float scale = kFormat == kFp8 ? multiply(as_float(scales.of[p]), c.power[q][p]) : c.power[q][p];
#pragma unroll
      for (i32 i = 0; i < 2; ++i)
#pragma unroll
        for (i32 r = 0; r < 2; ++r) sum[i][0][2 * r + q] = fused_multiply_add(d.of[i][p][2 * r + q], scale, sum[i][0][2 * r + q]);
    }
}
