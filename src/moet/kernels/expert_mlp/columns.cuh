// Sixteen columns of a row of weights as bf16, in the registers of the A fragments that take them (mma.m16n8k16, and wgmma's warps).
//
// A chunk is 64 columns: lane t of four takes columns 16t .. 16t+15 of its rows, whole words of codes.
// Pair r (0 .. 7) of a lane goes into the fragment of product r / 2, its lower (even r) or upper half of K. So the activations of a chunk have to lie in this
// order, here called arranged: place 8r + 2t + e (e: 0, 1) holds column column_of_pair(t, r) + e * kApart. Where a code ends up in a register is what its decoding
// finds cheapest.
//
// ALU instructions for the 16 columns, scale included: tcq2 25, sym2 20, mxfp4 22, fp8 20.
#pragma once
#include "weights.cuh"

constexpr i32 kApart = kFormat == kTcq2 || kFormat == kBf16 ? 1 : kBits == 4 ? 4 : 2;   // columns between the two of a pair
constexpr i32 kWords = kBits / 2;                                                       // of a row's 16 columns

DEVICE i32 column_of_pair(i32 t, i32 r) {
  if (kApart == 1) return 16 * t + 2 * r;
  if (kBits == 4) return 16 * t + 8 * (r >> 2) + (r & 3);
  if (kBits == 8) return 16 * t + 4 * (r >> 1) + (r & 1);
  return 16 * t + 8 * (r >> 2) + 4 * (r & 1) + ((r >> 1) & 1);   // sym2
}
// The other way round: where the pair lies that a column (0 .. 63) is in; it is the second of the two if its bit kApart is set.
DEVICE i32 place_of(i32 column) {
  const i32 c = column & 15;
  const i32 r = kApart == 1 ? c >> 1 : kBits == 4 ? 4 * (c >> 3) + (c & 3) : kBits == 8 ? 2 * (c >> 2) + (c & 1) : 4 * (c >> 3) + 2 * (c & 1) + ((c >> 2) & 1);
  return 8 * r + 2 * (column >> 4);
}

// tcq2's weights come out 2^-24 of what they are: it lets a table's byte be a bf16 below the normal range, without an exponent to put in. FP8's 2^-40: bits are numbers of
// 2^-120, and scales from 2^-77 to 2^47 times what is missing are normal ones.
constexpr float kUnit = kFormat == kTcq2 ? 16777216.0f : kFormat == kFp8 ? 1099511627776.0f : 1.0f;

// A lane's sixteen columns of a row as they lie in the chunk's two blocks, and the row's scale there.
struct Sixteen {
  u32 word[kWords];
  u32 scale;   // a byte; FP8: a float32
};

// A byte's UE8M0 or E4M3 as bf16, in both halves. 2^-127 is below the normal range.
DEVICE u32 scale_of(u32 byte) {
  if (kFormat == kNvfp4) {   // as a float32 with its exponent field E4M3 is 2^-120 of its value
    const float value = as_float(((byte & 0x80) << 24) | ((byte & 0x7f) << 20));
    return (as_bits(multiply(value, as_float(247u << 23))) >> 16) * 0x10001u;
  }
  return maximum_u16x2(byte * 0x800080u, 0x400040u);
}

// Constants of the decoding, for registers outside the loop over K. They come out of shared memory, so that the compiler does not know them: what it knows it moves
// into a register again before each use, 14 instructions for 32 columns of tcq2. An addition as a product with `one` and a sum leaves the ALU to what only it can do.
struct Constants { u32 low, high, one, scale, offset; };
DEVICE Constants constants() {
  if constexpr (kFormat == kTcq2) {   // scales: times 2^(133 - 24), and -16 times that, as bf16
    return {0x070d1b13u, 0x151f090fu, 1, ((112u + 109u) << 7) * 0x10001u, ((112u + 109u - 133u + 4u) << 7) * 0x10001u + 0x80008000u};
  } else if constexpr (kFormat == kSym2) {
    return {0x403fbfc0u, 0x80u, 0, 0, 0};   // upper and lower bytes of -4, -1, 1, 4: 0xc080, 0xbf80, 0x3f80, 0x4080
  } else {
    return {};
  }
}

DEVICE void decode_sixteen(const Sixteen& s, const Constants& constant, u32 (&pair)[8]) {
  if constexpr (kFormat == kTcq2) {
    // Levels of even columns are nibbles of the word, those of odd ones of the word two bits on. Two tables of 8 bytes, level + 16: a selector with its bit 3 set
    // takes the byte's sign, none, so one of the two is zero. As bf16 a byte is 2^-133 of its number.
    const u32 scale = multiply_add(s.scale, 0x100010u, constant.scale), offset = multiply_add(s.scale, 0x100010u, constant.offset);
    const u32 words[2] = {s.word[0], static_cast<u32>(static_cast<i32>(s.word[0]) >> 2)};
#pragma unroll
    for (i32 half = 0; half < 2; ++half) {
      u32 bytes[2];
#pragma unroll
      for (i32 odd = 0; odd < 2; ++odd)
        bytes[odd] = multiply_add(permute_bytes(constant.low, 0x1117010bu, words[odd] >> (16 * half)), constant.one,
                                  permute_bytes(constant.high, 0x0d051319u, (words[odd] ^ 0x88888888u) >> (16 * half)));
#pragma unroll
      for (u32 i = 0; i < 4; ++i) {   // bytes i of both, above each a sign: none
        const u32 both = permute_bytes(bytes[0], bytes[1], 0xc480u + i * 0x1111u);
        pair[4 * half + i] = multiply_add_bf16x2(both, scale, offset);
      }
    }
  } else if constexpr (kFormat == kSym2) {
    const u32 scale = scale_of(s.scale);
    const u32 codes[2] = {s.word[0] & 0x33333333u, s.word[0] >> 2 & 0x33333333u};
#pragma unroll
    for (i32 half = 0; half < 2; ++half)
#pragma unroll
      for (i32 odd = 0; odd < 2; ++odd) {
        const u32 high = permute_bytes(constant.low, 0, codes[odd] >> (16 * half));
        pair[4 * half + 2 * odd] = multiply_bf16x2(permute_bytes(high, constant.high, 0x1404), scale);
        pair[4 * half + 2 * odd + 1] = multiply_bf16x2(permute_bytes(high, constant.high, 0x3424), scale);
      }
  } else if constexpr (kBits == 4) {
    // E2M1 below a bf16's sign is 2^-126 of its value, 0.5 included.
    const u32 scale = scale_of(s.scale);
#pragma unroll
    for (i32 i = 0; i < 8; ++i) {
      const i32 at = 4 * (i & 3);   // nibbles at `at` and 16 bits on
      const u32 w = s.word[i >> 2], sign = w << (12 - at), magnitude = at > 6 ? w >> (at - 6) : w << (6 - at);
      pair[i] = multiply_bf16x2(multiply_bf16x2(select_bits(0x80008000u, sign, magnitude) & 0x81c081c0u, 0x7e807e80u), scale);
    }
  } else if constexpr (kBits == 8) {
    // E4M3 likewise is 2^-120. A scale is two bf16: the product with both is rounded once.
    const float scale = multiply(as_float(s.scale), as_float((127u + 80u) << 23));
    const u32 high = pack_bf16(scale, scale), rest = as_bits(add(scale, -as_float(high & 0xffff0000u))), low = pack_bf16(as_float(rest), as_float(rest));
#pragma unroll
    for (i32 i = 0; i < 8; ++i) {
      const u32 w = s.word[i >> 1], sign = i & 1 ? w : w << 8, magnitude = i & 1 ? w >> 4 : w << 4;
      const u32 codes = select_bits(0x80008000u, sign, magnitude) & 0x87f087f0u;
      pair[i] = kFormat == kFp8Row ? multiply_bf16x2(codes, 0x7b807b80u) : multiply_add_bf16x2(codes, high, multiply_bf16x2(codes, low));
    }
  } else {
#pragma unroll
    for (i32 i = 0; i < 8; ++i) pair[i] = s.word[i];
  }
}

// One thread for each 16 bytes: rows of activations, arranged; columns past the last one are zeros.
DEVICE void arrange_unit(const u16* row, i32 columns, i64 unit, u16* to) {
  const i32 chunk = static_cast<i32>(unit >> 3), r = static_cast<i32>(unit & 7);
  u32 word[4];
#pragma unroll
  for (i32 t = 0; t < 4; ++t) {
    const i32 column = 64 * chunk + column_of_pair(t, r);
    const u32 low = column < columns ? row[column] : 0, high = column + kApart < columns ? row[column + kApart] : 0;
    word[t] = low | high << 16;
  }
  store16(to + 8 * unit, {word[0], word[1], word[2], word[3]});
}
