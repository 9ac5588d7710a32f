// Codes of a row (docs/row-format.md) to the int8 A fragments of mma.m16n8k32, for the formats whose levels are small integers: sym2, tcq2, mxfp4, nvfp4.
// 32 columns of a row and of an activation plane make an exact int32; scales come after it, in float32, as on a CPU (decisions/002).
//
// A warp takes a chunk: a strip's 64 rows x 64 columns, as two halves of 32 rows. Lane (g, t) = (lane / 4, lane % 4) loads 16 bytes at a time, the words of
// rows 4g .. 4g + 3, and keeps their codes:
//   2 bits: columns 16 (t % 2) .. + 15 of block t / 2     4 bits: columns 8t .. 8t + 7 of both blocks
// Fragment i (0, 1): its row g is row 4g + 2i of the half, its row g + 8 is row 4g + 2i + 1. Columns are in whatever order the lane has them: weights and
// activations agree on it lane by lane.
//
// The eight columns of a product are two pairs x two parts x two planes: column g is pair g / 4, part g / 2 % 2, plane g % 2, and lane t has the sums of pair
// t / 2 and part t % 2. A part is one of two scales of a chunk's rows: blocks 0 and 1, or, for nvfp4, columns 0 .. 15 and 16 .. 31 of a block. Activations that
// are not of a column's part are zeros there. So two pairs fill the products that one needs, and a lane has one scale to read and apply where it would have two.
#pragma once
#include "activations.cuh"
#include "weights.cuh"

// Tables of bytes take 128 KiB of shared memory: where a multiprocessor has that, and memory that outruns its 64 integer lanes.
constexpr bool kTable = kFormat == kTcq2 && (MOET_ARCH == 90 || MOET_ARCH == 100);
// Its shared address is a constant, which then stands in the load; what comes before it in a block's memory ends there. The system's own 1 KiB is in front of that.
constexpr i32 kTableBytes = kTable ? 1024 * 128 : 0, kTableAt = 80 << 10, kSystemBytes = 1 << 10;

constexpr bool kInterleaved = kBits == 2 && !kTable;     // a lane's columns are 0 2 4 6, 1 3 5 7, 8 10 12 14, 9 11 13 15
constexpr i32 kSums = kFormat == kNvfp4 ? 2 : 1;         // of a lane's rows in a chunk, each with its scale
constexpr i32 kNumbers = kPlanes, kLaneSums = 2;         // sums of a lane, fragment and tile: of two rows
constexpr i32 kTerms = kTable || kFormat == kSym2 ? 1 : 2;   // a weight is the sum of so many bytes, each of which is multiplied (kTerm)
// What sums are multiplied by in the end: E2M1 levels are doubled; nvfp4's scales are 2^-120 of their value, and 2^60 fits before the product.
constexpr float kAfter = kFormat == kMxfp4 ? 0.5f : kFormat == kNvfp4 ? 0.5f * 1152921504606846976.0f : 1.0f;

// What a lane holds of one half of a chunk: the words of its 4 rows; their scales, of its part; nvfp4: of each block.
struct Words { Vec4 of[kBits / 2]; };
struct Scales { u32 of[kSums]; };
// Where a lane's codes and scales are in a chunk, in bytes; of either half 0.
DEVICE u32 codes_of(i32 g, i32 t) { return kBits == 2 ? (t >> 1) * kBlockBytes + swizzled(t & 1, g) : swizzled(t, g); }
DEVICE u32 scales_of(i32 g, i32 t) { return kCodeBytes + 4 * g + (t & 1) * (kFormat == kNvfp4 ? 64 : kBlockBytes); }
// From their shared addresses.
DEVICE void load_half(Words& w, u32 codes, i32 half) {
#pragma unroll
  for (i32 b = 0; b < kBits / 2; ++b) w.of[b] = load_shared16(codes + b * kBlockBytes + 128 * half);
}
DEVICE void load_scales(Scales& s, u32 scales, i32 half) {
#pragma unroll
  for (i32 b = 0; b < kSums; ++b) s.of[b] = load_shared(scales + b * kBlockBytes + 32 * half);
}

// --- codes to bytes

constexpr u32 kLevels2 = 0x0401fffc;                     // sym2: -4, -1, 1, 4
// A byte permute sees three bits of a nibble; where the fourth is set it gives a byte's sign, 0 or -1. So the level of one of 16 codes (tcq2's windows; E2M1, doubled) is
// the sum of two permutes, one for codes 0 .. 7 and one for 15 .. 8, whose nibbles are complemented; of codes i and i + 8 at most one is negative, and the other has 1
// more here. Products add the two up, one more for 16 registers of weights, where an instruction would for each of them.
constexpr u32 kTerm[2][2] = {{kFormat == kTcq2 ? 0xf7fd0c04u : 0x04030200u, kFormat == kTcq2 ? 0x0208f1fbu : 0x0d090705u},
                             {kFormat == kTcq2 ? 0x0a04f5fdu : 0xfcfaf8f4u, kFormat == kTcq2 ? 0xfff91006u : 0x00fffefdu}};
// Four bytes, of the nibbles in the selector's low half.
template <i32 kWhich> DEVICE u32 term_of(u32 nibbles) { return permute_bytes(kTerm[kWhich][0] + unknown_zero(), kTerm[kWhich][1] + unknown_zero(), nibbles); }

// 1024 windows of four tcq2 codes and what follows them, each 32 times: a lane then has a bank of its own. All threads of a block; a barrier comes before its use.
DEVICE void fill_table(u8* table) {
  for (i32 window = thread_id(); window < 1024; window += thread_count()) {
    u32 bytes = 0;
#pragma unroll
    for (i32 k = 0; k < 4; ++k) bytes |= ((term_of<0>(window >> (2 * k)) + term_of<1>(~(window >> (2 * k)))) & 0xff) << (8 * k);
#pragma unroll
    for (i32 i = 0; i < 8; ++i) store16(table + 128 * window + 16 * ((i + thread_id()) % 8), {bytes, bytes, bytes, bytes});
  }
}
// `shifted`: a window's 10 bits at bit 7, anything around them; own: 4 * lane.
DEVICE u32 from_table(u32 shifted, u32 own) { return load_shared_at<kTableAt>((shifted & 0x1ff80u) | own); }

// Of the nibbles of two words.
DEVICE void terms_of(u32 first, u32 second, u32 (&bytes)[kTerms][4]) {
  const u32 words[2] = {first, second};
#pragma unroll
  for (i32 w = 0; w < 2; ++w) {
    const u32 upper = upper_half(words[w]);
    const i32 low = kInterleaved ? w : 2 * w, high = kInterleaved ? w + 2 : 2 * w + 1;
    bytes[0][low] = term_of<0>(words[w]), bytes[0][high] = term_of<0>(upper);
    bytes[kTerms - 1][low] = term_of<1>(complement(words[w])), bytes[kTerms - 1][high] = term_of<1>(complement(upper));
  }
}

// The 16 codes of a lane's row r (0 .. 3), as four words of bytes for each term.
DEVICE void bytes_of(const Words& words, i32 r, u32 own, u32 (&bytes)[kTerms][4]) {
  const u32 w = word_of(words.of[0], r);
  if (kTable) {
    bytes[0][0] = from_table(w << 7, own);
    bytes[0][1] = from_table(w >> 1, own);
    bytes[0][2] = from_table(w >> 9, own);
    bytes[0][3] = from_table(static_cast<u32>(static_cast<i32>(w) >> 17), own);
  } else if (kFormat == kSym2) {
    const u32 levels = kLevels2 + unknown_zero(), even = w & 0x33333333u, odd = w >> 2 & 0x33333333u;
    bytes[0][0] = permute_bytes(levels, 0, even);
    bytes[0][1] = permute_bytes(levels, 0, odd);
    bytes[0][2] = permute_bytes(levels, 0, upper_half(even));
    bytes[0][3] = permute_bytes(levels, 0, upper_half(odd));
  } else if (kFormat == kTcq2) {   // an even column's window is its nibble; past the word its last bit goes on
    terms_of(w, static_cast<u32>(static_cast<i32>(w) >> 2), bytes);
  } else {
    terms_of(w, word_of(words.of[kBits / 2 - 1], r), bytes);
  }
}

// --- scales

// The activations' part of `scale_of`, from a block's exponent, once a chunk and pair: an addend to the scale's bits where there is a scale for each of them, else a factor.
DEVICE i32 scale_part(i32 exponent) { return exponent + ((kFormat == kTcq2 ? 112 : kFormat == kNvfp4 ? 187 : 127) << 23); }
// float32 scale of row r, times the activations' power of two.
DEVICE float scale_of(u32 scales, i32 r, i32 part) {
  // Where it is in the word, times what brings it to the exponent: two instructions. The top byte is moved first.
  const u32 byte = r == 3 ? scales >> 24 : scales & (0xffu << (8 * r));
  const u32 to_exponent = 1u << (23 - 8 * (r == 3 ? 0 : r));
  if (kFormat == kTcq2) return as_float(multiply_add(byte, to_exponent >> 3, part));
  // UE8M0, of which 2^-127 counts as 0; E4M3, never negative: as float32 it is 2^-120 of its value.
  return multiply(as_float(byte * (kFormat == kNvfp4 ? to_exponent >> 3 : to_exponent)), as_float(part));
}

// --- activations

// What a lane loads of a chunk, for a tile of two pairs: codes of column g, exponents of pair t / 2.
struct Raw {
  Vec4 bytes;                // 2 bits: its 16 columns; 4 bits: its 8 of the column's block, or of both blocks
  u32 exponent[kSums];
};
// Whether a lane's columns are of column g's part.
DEVICE bool matches(i32 g, i32 t) { return kFormat == kMxfp4 || (g >> 1 & 1) == (t >> 1); }

// Where a lane's codes are in a chunk of a row of planes, and its exponents; nvfp4 takes both blocks'.
DEVICE u32 own_codes(i32 g, i32 t) { return (g & 1) * 32 + (kBits == 2 ? (t >> 1) * 64 + (t & 1) * 16 : (kFormat == kMxfp4 ? (g >> 1 & 1) * 64 : 0) + t * 8); }
DEVICE u32 own_exponents(i32 t) { return kFormat == kNvfp4 ? 0 : (t & 1) * 4; }
// `bytes` stay zeros where not `mine`: columns of the other part.
DEVICE void load_columns(Raw& r, const u8* codes, const u8* exponents, bool mine, bool there) {
  if (kBits == 2) load_vector_if<0>(mine, r.bytes, codes);
  else load_double_if<0>(mine, r.bytes.x, r.bytes.y, codes);
  if (kFormat == kNvfp4) load_double_if<64>(mine, r.bytes.z, r.bytes.w, codes);
  if (kSums == 2) load_double_if<0>(there, r.exponent[0], r.exponent[kSums - 1], exponents);
  else load_single_if<0>(there, r.exponent[0], exponents);
}

// What products take of the activations of a chunk, and what comes behind them: other registers than those that the next ones are loaded into.
template <i32 kN> struct Columns {
  u32 b[kN][4];
  i32 part[kN][kSums];
};
template <i32 kN> DEVICE Columns<kN> columns_of(const Raw* raw, i32 g, i32 t) {
  Columns<kN> c;
#pragma unroll
  for (i32 n = 0; n < kN; ++n) {
    const u32 v[4] = {raw[n].bytes.x, raw[n].bytes.y, raw[n].bytes.z, raw[n].bytes.w};
#pragma unroll
    for (i32 w = 0; w < 4; ++w)
      c.b[n][w] = kInterleaved ? permute_bytes(v[w & 2], v[(w & 2) + 1], w & 1 ? 0x7531 : 0x6420) : kFormat == kMxfp4 ? ((g >> 1 & 1) == w >> 1 ? v[w & 1] : 0) : v[w];
#pragma unroll
    for (i32 s = 0; s < kSums; ++s) c.part[n][s] = scale_part(static_cast<i32>(raw[n].exponent[s]));
  }
  return c;
}
// The integer sums of half a chunk's weights x the columns, of fragment i and tile n.
template <i32 kN> struct Products { i32 of[2][kN][kSums][4]; };
// own: 4 * lane.
template <i32 kN> DEVICE void multiply(Products<kN>& d, const Words& words, const Columns<kN>& c, u32 own) {
#pragma unroll
  for (i32 i = 0; i < 2; ++i) {
    u32 upper[kTerms][4], lower[kTerms][4];   // rows of the fragment
    bytes_of(words, 2 * i, own, upper);
    bytes_of(words, 2 * i + 1, own, lower);
#pragma unroll
    for (i32 n = 0; n < kN; ++n)
#pragma unroll
      for (i32 m = 0; m < 2; ++m)   // half of the lane's columns, or a block
#pragma unroll
        for (i32 k = 0; k < kTerms; ++k) {
          const i32 s = m % kSums;
          const Fragment a = {upper[k][2 * m], lower[k][2 * m], upper[k][2 * m + 1], lower[k][2 * m + 1]};
          if (m < kSums && k == 0) mma_s8(d.of[i][n][s], a, {c.b[n][2 * m], c.b[n][2 * m + 1]}, {0, 0, 0, 0});
          else mma_s8(d.of[i][n][s], a, {c.b[n][2 * m], c.b[n][2 * m + 1]}, d.of[i][n][s]);
        }
  }
}
// sum[i][n][r] += them with their scales: row 4g + 2i + r of the half, pair t / 2, part t % 2.
template <i32 kN, i32 kMost> DEVICE void add_products(const Products<kN>& d, const Scales& scales, const Columns<kN>& c, float (&sum)[2][kMost][kLaneSums]) {
#pragma unroll
  for (i32 i = 0; i < 2; ++i)
#pragma unroll
    for (i32 n = 0; n < kN; ++n)
#pragma unroll
      for (i32 s = 0; s < kSums; ++s)
#pragma unroll
        for (i32 r = 0; r < 2; ++r) {   // below 2^24: 15 * 32 * kLargest
          const float exact = to_float(static_cast<i32>(multiply_add(d.of[i][n][s][2 * r], 256, d.of[i][n][s][2 * r + 1])));
          sum[i][n][r] = fused_multiply_add(exact, scale_of(scales.of[s], 2 * i + r, c.part[n][s]), sum[i][n][r]);
        }
}
