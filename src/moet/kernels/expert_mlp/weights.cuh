// The formats of a row (docs/row-format.md), and the bf16 A fragments of mma.m16n8k16 for those of 8 and 16 bits; columns.cuh has fragments of all of them, in another
// order of columns. FORMAT is the number of the row's format in moet.layout.FORMATS.
//
// A warp takes 32 rows x 64 columns, a chunk. Lane (g, t) = (lane / 4, lane % 4) loads 16 bytes at a time, the words of rows 4g .. 4g + 3 at one step, so that
// 8 lanes read 128 bytes in a row. A word's codes all stay in the lane that loaded them: the order of columns inside a chunk is permuted for that, the
// same way for weights and activations, which leaves the products of the sum as they are:
//
//   product m of a chunk (0 .. 3), lane t: columns column_of(m, t) .. + 3
//   fragment i (0, 1): its row g is row 4g + 2i of the 32, its row g + 8 is row 4g + 2i + 1
//
// FP8's scales are float32: they multiply the sum of 32 columns behind the product.
#pragma once
#include "../gpu/gpu.cuh"

enum Format : i32 { kSym2 = 0, kMxfp4 = 1, kNvfp4 = 2, kFp8 = 3, kFp8Row = 4, kBf16 = 5, kTcq2 = 6 };
#ifndef FORMAT
#error "FORMAT: expected the number of a row format"
#endif
constexpr i32 kFormat = FORMAT;
constexpr i32 kBits = kFormat == kSym2 || kFormat == kTcq2 ? 2 : kFormat <= kNvfp4 ? 4 : kFormat <= kFp8Row ? 8 : 16;
constexpr i32 kCodeBytes = 64 * 32 * kBits / 8;
constexpr i32 kScaleBytes = kFormat == kFp8 ? 16 : kFormat == kFp8Row ? 256 : kFormat == kNvfp4 ? 128 : kFormat == kBf16 ? 0 : 64;
constexpr i32 kBlockBytes = kCodeBytes + kScaleBytes;
constexpr bool kScaleAfter = kFormat == kFp8 || kFormat == kFp8Row;

DEVICE Vec4 load_words(const u8* p) { return *reinterpret_cast<const Vec4*>(p); }
DEVICE u32 load_word(const u8* p) { return *reinterpret_cast<const u32*>(p); }
DEVICE float load_float(const u8* p) { return *reinterpret_cast<const float*>(p); }
DEVICE u32 word_of(const Vec4& v, i32 r) { return r == 0 ? v.x : r == 1 ? v.y : r == 2 ? v.z : v.w; }
DEVICE u32 select_bits(u32 mask, u32 a, u32 b) { return (a & mask) | (b & ~mask); }

DEVICE i32 column_of(i32 m, i32 t) { return 16 * m + 4 * t; }

// What a lane holds of a chunk: words of 4 rows at kLoads steps, and the scales that go behind the product.
constexpr i32 kLoads = kBits / 2;
struct Chunk {
  Vec4 words[kLoads];
  float after[2][4];     // of each block and row
};

// first, second: the chunk's two blocks of 64 rows x 32 columns; half: rows 0-31 or 32-63.
DEVICE void load_chunk(Chunk& c, const u8* first, const u8* second, i32 half, i32 g, i32 t) {
  const i32 row = 32 * half + 4 * g;
#pragma unroll
  for (i32 b = 0; b < 2; ++b) {
    const u8* block = b ? second : first;
#pragma unroll
    for (i32 i = 0; i < kLoads / 2; ++i) {   // 8 bits: steps t, 4 + t; 16: steps 2t, 2t + 1, 8 + 2t, 8 + 2t + 1
      const i32 step = kBits == 8 ? 4 * i + t : 8 * (i >> 1) + 2 * t + (i & 1);
      c.words[b * (kLoads / 2) + i] = load_words(block + (step * 64 + row) * 4);
    }
#pragma unroll
    for (i32 r = 0; r < 4; ++r) {
      if (kFormat == kFp8) c.after[b][r] = load_float(block + kCodeBytes + 4 * half);
      if (kFormat == kFp8Row) c.after[b][r] = load_float(block + kCodeBytes + (row + r) * 4);
    }
  }
}

// The eight codes of row r for products 2p (pair[0], pair[1]) and 2p + 1, as bf16 without scale.
DEVICE void levels(const Chunk& c, i32 p, i32 r, u32 (&pair)[4]) {
#pragma unroll
  for (i32 i = 0; i < 4; ++i) {
    if (kBits == 8) {
      constexpr u32 k2To120 = 0x7b807b80u;   // E4M3's bits, moved, are a bf16 of 2^-120 the value, subnormals included
      const u32 codes = word_of(c.words[2 * p + (i >> 1)], r) >> (16 * (i & 1));
      const u32 first = (codes & 0x80) << 8 | (codes & 0x7f) << 4, second = (codes & 0x8000) << 16 | (codes & 0x7f00) << 12;
      pair[i] = multiply_bf16x2(first | second, k2To120);
    } else {
      pair[i] = word_of(c.words[4 * p + i], r);
    }
  }
}

// A fragments of products 2p and 2p + 1, rows 4g + 2i and 4g + 2i + 1.
DEVICE void fragments(const Chunk& c, i32 p, i32 i, u32 (&a)[2][4]) {
#pragma unroll
  for (i32 r = 0; r < 2; ++r) {
    u32 pair[4];
    levels(c, p, 2 * i + r, pair);
#pragma unroll
    for (i32 m = 0; m < 2; ++m) a[m][r] = pair[2 * m], a[m][2 + r] = pair[2 * m + 1];
  }
}
