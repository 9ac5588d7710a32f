// Codes of a row (docs/row-format.md) to the bf16 A fragments of mma.m16n8k16. FORMAT is the number of the row's format in moet.layout.FORMATS.
//
// A warp takes 32 rows x 64 columns, a chunk. Lane (g, t) = (lane / 4, lane % 4) loads 16 bytes at a time, the words of rows 4g .. 4g + 3 at one step, so that
// 8 lanes read 128 bytes in a row. A word's codes all stay in the lane that loaded them: the order of columns inside a chunk is permuted for that, the
// same way for weights and activations, which leaves the products of the sum as they are:
//
//   product m of a chunk (0 .. 3), lane t: columns column_of(m, t) .. + 3
//   fragment i (0, 1): its row g is row 4g + 2i of the 32, its row g + 8 is row 4g + 2i + 1
//
// All levels are bf16 numbers, and level * scale is one too for sym2, tcq2, mxfp4 and nvfp4 (at most 8 significant bits), so scales go into the weights before
// the product. FP8's scales are float32: they multiply the sum of 32 columns behind it.
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
constexpr i32 kLoads = kBits / 2;   // 16-byte loads of a lane for a chunk

DEVICE i32 column_of(i32 m, i32 t) {
  return kBits == 2 ? 16 * t + 4 * m : kBits == 4 ? 32 * (m >> 1) + 8 * t + 4 * (m & 1) : 16 * m + 4 * t;
}

// What a lane holds of a chunk: words of 4 rows at kLoads steps, and the scales that go before (4 rows a word) or after the product.
struct Chunk {
  Vec4 words[kLoads];
  u32 scales[2];         // tcq2, sym2: [0] of the lane's block; mxfp4: of each block; nvfp4: of each block, the lane's 16 columns
  float after[2][4];     // of each block and row
};

DEVICE Vec4 load_words(const u8* p) { return *reinterpret_cast<const Vec4*>(p); }
DEVICE u32 load_word(const u8* p) { return *reinterpret_cast<const u32*>(p); }
DEVICE float load_float(const u8* p) { return *reinterpret_cast<const float*>(p); }

// first, second: the chunk's two blocks of 64 rows x 32 columns; half: rows 0-31 or 32-63.
DEVICE void load_chunk(Chunk& c, const u8* first, const u8* second, i32 half, i32 g, i32 t) {
  const i32 row = 32 * half + 4 * g;
  if (kBits == 2) {
    const u8* block = t & 2 ? second : first;
    c.words[0] = load_words(block + ((t & 1) * 64 + row) * 4);
    c.scales[0] = load_word(block + kCodeBytes + row);
    return;
  }
#pragma unroll
  for (i32 b = 0; b < 2; ++b) {
    const u8* block = b ? second : first;
#pragma unroll
    for (i32 i = 0; i < kLoads / 2; ++i) {   // 4 bits: step t; 8: steps t, 4 + t; 16: steps 2t, 2t + 1, 8 + 2t, 8 + 2t + 1
      const i32 step = kBits == 4 ? t : kBits == 8 ? 4 * i + t : 8 * (i >> 1) + 2 * t + (i & 1);
      c.words[b * (kLoads / 2) + i] = load_words(block + (step * 64 + row) * 4);
    }
    const u8* scales = block + kCodeBytes;
    if (kFormat == kMxfp4) c.scales[b] = load_word(scales + row);
    if (kFormat == kNvfp4) c.scales[b] = load_word(scales + (t >> 1) * 64 + row);
#pragma unroll
    for (i32 r = 0; r < 4; ++r) {
      if (kFormat == kFp8) c.after[b][r] = load_float(scales + 4 * half);
      if (kFormat == kFp8Row) c.after[b][r] = load_float(scales + (row + r) * 4);
    }
  }
}

DEVICE u32 word_of(const Vec4& v, i32 r) { return r == 0 ? v.x : r == 1 ? v.y : r == 2 ? v.z : v.w; }

// bf16 bits of a scale byte.
DEVICE u32 scale_bits(u32 byte) {
  if (kFormat == kTcq2) return (byte << 4) + (112 << 7);
  if (kFormat == kNvfp4) {   // E4M3; as a bf16 with that exponent field it is 2^-120 of its value, subnormals included
    const float value = as_float(((byte & 0x80) << 24) | ((byte & 0x7f) << 20));
    return as_bits(multiply(value, as_float(247u << 23))) >> 16;
  }
  return byte ? byte << 7 : 0x40;   // UE8M0; 2^-127 is subnormal
}
// The scale of row r (0 .. 3) for products 2p and 2p + 1, in both halves.
DEVICE u32 scale_pair(const Chunk& c, i32 p, i32 r) {
  const u32 bits = scale_bits((c.scales[kBits == 2 ? 0 : p] >> (8 * r)) & 0xff);
  return bits | bits << 16;
}

DEVICE u32 select_bits(u32 mask, u32 a, u32 b) { return (a & mask) | (b & ~mask); }

// Eight nibbles, each a sign (bit 3, given apart as `signs`, one at bit 0 of each nibble) over one of 8 magnitudes (`index`) whose bf16 bytes are in tables.
DEVICE void from_table(u32 signs, u32 index, u32 low0, u32 low1, u32 high0, u32 high1, u32 (&pair)[4]) {
#pragma unroll
  for (i32 half = 0; half < 2; ++half) {
    const u32 i = index >> (16 * half), sign = permute_bytes(0x8000u, 0, signs >> (16 * half));
    const u32 low = permute_bytes(low0, low1, i), high = permute_bytes(high0, high1, i) ^ sign;
    pair[2 * half] = permute_bytes(low, high, 0x5140);
    pair[2 * half + 1] = permute_bytes(low, high, 0x7362);
  }
}

// The eight codes of row r for products 2p (pair[0], pair[1]) and 2p + 1, as bf16 without scale.
DEVICE void levels(const Chunk& c, i32 p, i32 r, u32 (&pair)[4]) {
  if (kFormat == kSym2) {
    const u32 y = permute_bytes(word_of(c.words[0], r), 0, p ? 0x4342 : 0x4140);   // four codes in each half's low byte
    const u32 nibbles = select_bits(0x00ff00ffu, select_bits(0x000f000fu, y, y << 2), select_bits(0x0f000f00u, y << 4, y << 6)) & 0x33333333u;
#pragma unroll
    for (i32 half = 0; half < 2; ++half) {
      const u32 high = permute_bytes(0x403fbfc0u, 0, nibbles >> (16 * half));   // -4, -1, 1, 4: 0xc080, 0xbf80, 0x3f80, 0x4080
      pair[2 * half] = permute_bytes(high, 0x80u, 0x1404);
      pair[2 * half + 1] = permute_bytes(high, 0x80u, 0x3424);
    }
  } else if (kFormat == kTcq2) {
    // A level depends on its code and the next one: 10 bits for four of them, from byte 2p, and from byte 2p + 1 into the upper half. Past the word its last bit goes on.
    const u32 y = permute_bytes(word_of(c.words[0], r), 0, p ? 0xb332 : 0x2110);
    const u32 nibbles = select_bits(0x00ff00ffu, select_bits(0x000f000fu, y, y << 2), select_bits(0x0f000f00u, y << 4, y << 6));
    const u32 upper = nibbles >> 3 & 0x11111111u;   // levels 8 .. 15 are the others' negatives, backwards
    from_table(upper, (nibbles ^ (upper * 7)) & 0x77777777u, 0x10403040u, 0x80e070a0u, 0xc1c04140u, 0x3f40c1c0u, pair);
  } else if (kBits == 4) {
    const u32 nibbles = word_of(c.words[p], r);
    from_table(nibbles >> 3 & 0x11111111u, nibbles & 0x77777777u, 0xc0800000u, 0xc0804000u, 0x3f3f3f00u, 0x40404040u, pair);
  } else if (kBits == 8) {
    constexpr u32 k2To120 = 0x7b807b80u;   // E4M3's bits, moved, are a bf16 of 2^-120 the value, subnormals included
#pragma unroll
    for (i32 i = 0; i < 4; ++i) {
      const u32 codes = word_of(c.words[2 * p + (i >> 1)], r) >> (16 * (i & 1));
      const u32 first = (codes & 0x80) << 8 | (codes & 0x7f) << 4, second = (codes & 0x8000) << 16 | (codes & 0x7f00) << 12;
      pair[i] = multiply_bf16x2(first | second, k2To120);
    }
  } else {
#pragma unroll
    for (i32 i = 0; i < 4; ++i) pair[i] = word_of(c.words[4 * p + i], r);
  }
}

// A fragments of products 2p and 2p + 1, rows 4g + 2i and 4g + 2i + 1.
DEVICE void fragments(const Chunk& c, i32 p, i32 i, u32 (&a)[2][4]) {
#pragma unroll
  for (i32 r = 0; r < 2; ++r) {
    u32 pair[4];
    levels(c, p, 2 * i + r, pair);
    if (!kScaleAfter && kFormat != kBf16) {
      const u32 scale = scale_pair(c, p, 2 * i + r);
#pragma unroll
      for (i32 j = 0; j < 4; ++j) pair[j] = multiply_bf16x2(pair[j], scale);
    }
#pragma unroll
    for (i32 m = 0; m < 2; ++m) a[m][r] = pair[2 * m], a[m][2 + r] = pair[2 * m + 1];
  }
}
