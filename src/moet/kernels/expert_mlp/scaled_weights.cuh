// Codes of a row (docs/row-format.md) to the E4M3 A fragments of mma_block_scaled: 32 columns, a scale's block, an instruction. FORMAT as in weights.cuh.
//
// All levels are E4M3 numbers. UE8M0 scales (sym2, mxfp4) go into the instruction as they are. The others are no powers of two: with 2^0 inside, they multiply
// the float32 sum of their 32 columns behind it (tcq2, fp8), or that of all columns (fp8_row). nvfp4 has a scale for 16 columns, so half of each instruction
// would be zeros: it stays with large.cuh, like bf16.
//
// All four lanes of a row must hold columns of one block, so a 2-bit word, 16 columns, is read by two lanes. Each takes the codes that are whole nibbles for
// it: lane t has step t % 2, and of that the even (t < 2) or the odd columns. A nibble is then an index for a byte permute, and for tcq2 it has the next
// code too. Where a lane's 8 columns stand in the block is code_position's matter: activations are stored in that order.
#pragma once
#include "../gpu/block_scaled.cuh"
#include "weights.cuh"

static_assert(kFormat != kNvfp4 && kFormat != kBf16, "a row format whose levels are E4M3 with one scale for 32 columns");
constexpr bool kScaleInside = kFormat == kSym2 || kFormat == kMxfp4, kScaleOfBlocks = kFormat == kTcq2 || kFormat == kFp8;
constexpr i32 kCodeWords = kBits == 8 ? 2 : 1;   // of a lane for a row
constexpr u32 kScaleOne = 127;
constexpr u32 kCodeShift = kFormat == kMxfp4 ? 6 : 0;   // its codes stand for 2^-6 of the levels; the activations' scales take that back

// Columns 4g .. 4g + 3 of a block, two and two, in its 32 bytes of activations: the even ones at code_position, the odd ones kPairsApart on (8 bits: the first two, the
// last two).
constexpr i32 kPairsApart = kBits == 2 ? 16 : kBits == 4 ? 4 : 2;
DEVICE i32 code_position(i32 g) { return kBits == 2 ? 8 * (g >> 2) + 2 * (g & 3) : kBits == 4 ? 8 * (g >> 1) + 2 * (g & 1) : 8 * (g & 3) + 4 * (g >> 2); }

// What a lane holds of 32 rows x 32 columns: the words of rows 4g .. 4g + 3, and their scales.
struct ScaledBlock {
  Vec4 words[kCodeWords];
  u32 scales;       // one a byte; fp8: float32 bits, of all of them
};

DEVICE void load_scaled(ScaledBlock& b, const u8* block, i32 half, i32 g, i32 t) {
  const i32 row = 32 * half + 4 * g;
#pragma unroll
  for (i32 i = 0; i < kCodeWords; ++i) b.words[i] = load_once(block, ((4 * i + (kBits == 2 ? t & 1 : t)) * 64 + row) * 4);
  if (kBits <= 4) b.scales = load_single(block, kCodeBytes + row);
  if (kFormat == kFp8) b.scales = load_single(block, kCodeBytes + 4 * half);
}

// The eight codes of row r.
DEVICE void scaled_levels(const ScaledBlock& b, i32 r, i32 t, u32& first, u32& second) {
  const u32 word = word_of(b.words[0], r);
  if (kFormat == kSym2) {
    const u32 nibbles = word >> (t & 2) & 0x33333333u;
    first = permute_bytes(0x4838b8c8u, 0, nibbles);   // -4, -1, 1, 4
    second = permute_bytes(0x4838b8c8u, 0, nibbles >> 16);
  } else if (kFormat == kTcq2) {
    // A permute picks one of 8 bytes, or, where the selector has bit 3, the sign of that byte 8 times. Of two permutes with opposite bits 3 one then gives the
    // level and the other one 0 or ff, which the table has in it already. That wants levels of one sign at a place of both tables: with bit 2 flipped where bit
    // 3 is set they are, 8 + (m ^ 4) beside m.
    const u32 windows = static_cast<u32>(static_cast<i32>(word) >> (t & 2)), index = windows ^ (windows >> 1 & 0x44444444u), other = index ^ 0x88888888u;
    first = permute_bytes(0xd1c45344u, 0x384ed7cau, index) ^ permute_bytes(0x3b2c4451u, 0x4a573147u, other);
    second = permute_bytes(0xd1c45344u, 0x384ed7cau, index >> 16) ^ permute_bytes(0x3b2c4451u, 0x4a573147u, other >> 16);
  } else if (kFormat == kMxfp4) {   // E2M1's exponent and mantissa are E4M3's, subnormals included, but for the bias: 2^-6 of the value
    first = select_bits(0x80808080u, word << 4, word << 2) & 0x9c9c9c9cu;
    second = select_bits(0x80808080u, word, word >> 2) & 0x9c9c9c9cu;
  } else {
    first = word, second = word_of(b.words[kCodeWords - 1], r);
  }
}
// The A fragment of rows 4g + 2i and 4g + 2i + 1.
DEVICE void scaled_fragment(const ScaledBlock& b, i32 i, i32 t, u32 (&a)[4]) {
#pragma unroll
  for (i32 r = 0; r < 2; ++r) scaled_levels(b, 2 * i + r, t, a[r], a[2 + r]);
}
// Lanes 4g and 4g + 1 give the scales of its rows g and g + 8, each in its lowest byte: to shift here is less than to select another byte, which changes the
// instruction's selectors, a uniform register that has to be set and waited for each time.
DEVICE u32 inner_scale(const ScaledBlock& b, i32 i, i32 t) { return kScaleInside ? b.scales >> (8 * (2 * i + (t & 1))) : kScaleOne; }
// Of row r, behind the product.
DEVICE float outer_scale(const ScaledBlock& b, i32 r) { return as_float(kFormat == kTcq2 ? ((b.scales >> (8 * r) & 255) << 20) + (112u << 23) : b.scales); }
