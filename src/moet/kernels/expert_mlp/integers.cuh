// Codes of a row (docs/row-format.md) to the int8 A fragments of mma.m16n8k32, for the formats whose levels are small integers: sym2, tcq2, mxfp4, nvfp4.
// 32 columns of a row and of an activation plane make an exact int32; scales come after it, in float32, as on a CPU (decisions/002).
//
// A warp takes a chunk: a strip's 64 rows x 64 columns, as two halves of 32 rows. Lane (g, t) = (lane / 4, lane % 4) loads 16 bytes at a time, the words of
// rows 4g .. 4g + 3, and keeps their codes:
//   2 bits: columns 16 (t % 2) .. + 15 of block t / 2     4 bits: columns 8t .. 8t + 7 of both blocks
// Fragment i (0, 1): its row g is row 4g + 2i of the half, its row g + 8 is row 4g + 2i + 1. Columns are in whatever order the lane has them: weights and
// activations agree on it lane by lane.
//
// A group is the columns under one scale. Where only two of the four lanes of a row hold columns of a group, the others' activations are zeros: the tensor
// cores have time for twice the products (8 clocks of 40), registers and shuffles are what is short.
#pragma once
#include "activations.cuh"
#include "ring.cuh"

// Tables of bytes take 128 KiB of shared memory: where a multiprocessor has that, and memory that outruns its 64 integer lanes.
constexpr bool kTable = kFormat == kTcq2 && (MOET_ARCH == 90 || MOET_ARCH == 100);
constexpr i32 kTableBytes = kTable ? 1024 * 128 : 0;

constexpr i32 kGroups = kFormat == kNvfp4 ? 4 : 2;       // of a chunk
constexpr bool kMasked = kFormat != kMxfp4;              // half of the lanes hold columns of a group
constexpr bool kInterleaved = kBits == 2 && !kTable;     // a lane's columns are 0 2 4 6, 1 3 5 7, 8 10 12 14, 9 11 13 15
// Bytes of weights are level + kBias, where a byte permute cannot find signed ones; sums begin at -kBias times the activations' sum.
constexpr i32 kBias = kTable || kFormat == kSym2 ? 0 : kFormat == kTcq2 ? 16 : 12;
// What sums are multiplied by in the end: E2M1 levels are doubled; nvfp4's scales are 2^-120 of their value, and 2^60 fits before the product.
constexpr float kAfter = kFormat == kMxfp4 ? 0.5f : kFormat == kNvfp4 ? 0.5f * 1152921504606846976.0f : 1.0f;

// What a lane holds of one half of a chunk.
struct Packed {
  Vec4 words[kBits / 2];
  u32 scales[kGroups];       // of its 4 rows
};
// stage: where the chunk is in shared memory (ring.cuh).
DEVICE void load_packed(Packed& p, u32 stage, i32 half, i32 g, i32 t) {
  const u32 row = 128 * half + 16 * g, scale = (kPieces - 1) * kPiece + 256 + 32 * half + 4 * g;
  if (kBits == 2) p.words[0] = load_shared16(stage + (t >> 1) * kBlockStage + (t & 1) * kPiece + row);
#pragma unroll
  for (i32 b = 0; b < 2; ++b) {
    if (kBits == 4) p.words[b % (kBits / 2)] = load_shared16(stage + b * kBlockStage + t * kPiece + row);
    if (kFormat == kNvfp4) p.scales[2 * b % kGroups] = load_shared(stage + b * kBlockStage + scale), p.scales[(2 * b + 1) % kGroups] = load_shared(stage + b * kBlockStage + scale + 64);
    else p.scales[b] = load_shared(stage + b * kBlockStage + scale);
  }
}

// --- codes to bytes

constexpr u32 kLevels2 = 0x0401fffc;                     // sym2: -4, -1, 1, 4
// Levels + 16 of tcq2's windows 0 .. 15, doubled E2M1 levels + 12 of codes 0 .. 15: four bytes a word, all below 128.
constexpr u32 kBytes[4] = {kFormat == kTcq2 ? 0x070d1b13u : 0x0f0e0d0cu, kFormat == kTcq2 ? 0x1117010bu : 0x18141210u, kFormat == kTcq2 ? 0x151f090fu : 0x090a0b0cu,
                           kFormat == kTcq2 ? 0x0d051319u : 0x00040608u};
// Bytes of the four nibbles in the selector's low half. A byte permute sees three bits; with the fourth set it gives the sign of a byte, here 0. So
// one permute finds what has it clear, one what has it set.
DEVICE u32 look_up(u32 nibbles, u32 flipped) { return permute_bytes(kBytes[0], kBytes[1], nibbles) | permute_bytes(kBytes[2], kBytes[3], flipped); }

// 1024 windows of four tcq2 codes and what follows them, each 32 times: a lane then has a bank of its own. All threads of a block; a barrier comes before its use.
DEVICE void fill_table(u8* table) {
  for (i32 window = thread_id(); window < 1024; window += thread_count()) {
    u32 bytes = 0;
#pragma unroll
    for (i32 k = 0; k < 4; ++k) bytes |= ((look_up(window >> (2 * k), (window >> (2 * k)) ^ 0x8) - 16) & 0xff) << (8 * k);
#pragma unroll
    for (i32 i = 0; i < 8; ++i) store16(table + 128 * window + 16 * ((i + thread_id()) % 8), {bytes, bytes, bytes, bytes});
  }
}
// `shifted`: a window's 10 bits at bit 7, anything around them; own: 4 * lane. The table is at the start of the dynamic shared memory.
DEVICE u32 from_table(u32 shifted, u32 own) { return load_shared((shifted & 0x1ff80u) | own); }

// The 16 codes of a lane's row r (0 .. 3), as four words of bytes.
DEVICE void bytes_of(const Packed& p, i32 r, u32 own, u32 (&bytes)[4]) {
  const u32 w = word_of(p.words[0], r);
  if (kTable) {
    bytes[0] = from_table(w << 7, own);
    bytes[1] = from_table(w >> 1, own);
    bytes[2] = from_table(w >> 9, own);
    bytes[3] = from_table(static_cast<u32>(static_cast<i32>(w) >> 17), own);
  } else if (kFormat == kSym2) {
    const u32 even = w & 0x33333333u, odd = w >> 2 & 0x33333333u;
    bytes[0] = permute_bytes(kLevels2, 0, even);
    bytes[1] = permute_bytes(kLevels2, 0, odd);
    bytes[2] = permute_bytes(kLevels2, 0, even >> 16);
    bytes[3] = permute_bytes(kLevels2, 0, odd >> 16);
  } else if (kFormat == kTcq2) {   // an even column's window is its nibble; past the word its last bit goes on
    const u32 odd = static_cast<u32>(static_cast<i32>(w) >> 2), even_flipped = w ^ 0x88888888u, odd_flipped = odd ^ 0x88888888u;
    bytes[0] = look_up(w, even_flipped);
    bytes[1] = look_up(odd, odd_flipped);
    bytes[2] = look_up(w >> 16, even_flipped >> 16);
    bytes[3] = look_up(odd >> 16, odd_flipped >> 16);
  } else {
#pragma unroll
    for (i32 b = 0; b < 2; ++b) {
      const u32 codes = word_of(p.words[b % (kBits / 2)], r), flipped = codes ^ 0x88888888u;
      bytes[2 * b] = look_up(codes, flipped);
      bytes[2 * b + 1] = look_up(codes >> 16, flipped >> 16);
    }
  }
}

// --- scales

// The addend of `scale_of`, from a block's exponent (PlaneBlock): once a chunk and pair.
DEVICE i32 scale_addend(i32 exponent) { return exponent + (kFormat == kTcq2 ? 112 << 23 : kFormat == kNvfp4 ? 187 << 23 : 0); }
// float32 scale of row r, times the activations' power of two.
DEVICE float scale_of(u32 scales, i32 r, i32 addend) {
  // Where it is in the word, times what brings it to the exponent: two instructions. The top byte is moved first.
  const u32 byte = r == 3 ? scales >> 24 : scales & (0xffu << (8 * r));
  const u32 to_exponent = 1u << (23 - 8 * (r == 3 ? 0 : r));
  if (kFormat == kTcq2) return as_float(multiply_add(byte, to_exponent >> 3, addend));
  if (kFormat == kNvfp4) {   // E4M3; as float32 it is 2^-120 of its value
    const u32 bits = byte * (to_exponent >> 3);
    return multiply(as_float((bits & 0x07f00000u) | ((bits & 0x08000000u) << 4)), as_float(addend));
  }
  const i32 bits = static_cast<i32>(multiply_add(byte, to_exponent, addend));   // 2^-127 and less: 0
  return as_float(static_cast<u32>(bits > 0 ? bits : 0));
}

// --- activations

// What a lane loads of a chunk for the four pairs of a tile: fragment column g is pair g / 2's high (g even) or low plane; sums are pair t's.
struct Raw {
  Vec4 bytes;
  i32 exponent[2];           // of each block
  i32 sum[2], first[2];      // PlaneBlock's, where kBias
};
// codes, blocks: of the chunk, alike in all lanes; own: where pair g / 2's codes are from there; summed: pair t's blocks. Both blocks of a chunk are there.
DEVICE void load_columns(Raw& r, const u8* codes, const u8* blocks, u32 own, u32 summed, i32 g, i32 t) {
  if (kBits == 2) {
    r.bytes = load_vector(codes, own + (t >> 1) * 64 + (g & 1) * 32 + (t & 1) * 16);
  } else {
    const Vec2 left = load_double(codes, own + (g & 1) * 32 + t * 8), right = load_double(codes + 64, own + (g & 1) * 32 + t * 8);
    r.bytes = {left.x, left.y, right.x, right.y};
  }
#pragma unroll
  for (i32 b = 0; b < 2; ++b) {
    const u8* from = blocks + b * sizeof(PlaneBlock);
    if (kBias) {
      const Vec4 all = load_vector(from, summed);
      r.exponent[b] = static_cast<i32>(all.x), r.sum[b] = static_cast<i32>(all.y), r.first[b] = static_cast<i32>(all.z);
    } else {
      r.exponent[b] = static_cast<i32>(load_single(from, summed));
    }
  }
}

// The same as the products take it.
struct Columns {
  u32 bytes[4];
  i32 addend[2];             // of scale_of, of each block
  i32 start[kGroups];        // where the sums begin
};
DEVICE void arrange(Columns& c, const Raw& r) {
  Vec4 v = r.bytes;
  if (kInterleaved) v = {permute_bytes(v.x, v.y, 0x6420), permute_bytes(v.x, v.y, 0x7531), permute_bytes(v.z, v.w, 0x6420), permute_bytes(v.z, v.w, 0x7531)};
  c.bytes[0] = v.x, c.bytes[1] = v.y, c.bytes[2] = v.z, c.bytes[3] = v.w;
#pragma unroll
  for (i32 b = 0; b < 2; ++b) {
    c.addend[b] = scale_addend(r.exponent[b]);
    if (!kBias) c.start[b] = 0;
    else if (kFormat == kNvfp4) c.start[2 * b % kGroups] = -kBias * r.first[b], c.start[(2 * b + 1) % kGroups] = -kBias * (r.sum[b] - r.first[b]);
    else c.start[b] = -kBias * r.sum[b];
  }
}

// sum[half][i][n][r] += a chunk's weights x tile n's activations: row 4g + 2i + r, pair t. own: 4 * lane.
template <i32 kN> DEVICE void multiply(const Packed (&packed)[2], const Columns (&columns)[kN], i32 t, u32 own, float (&sum)[2][2][kN][2]) {
  constexpr i32 kProducts = kBits == 2 ? 2 : 1;   // of a group
  u32 b[kN][kGroups][kProducts][2];
#pragma unroll
  for (i32 n = 0; n < kN; ++n)
#pragma unroll
    for (i32 q = 0; q < kGroups; ++q) {
      const u32 mask = !kMasked || (t >> 1) == (kBits == 2 ? q : q & 1) ? ~0u : 0u;
#pragma unroll
      for (i32 m = 0; m < kProducts; ++m)
#pragma unroll
        for (i32 i = 0; i < 2; ++i) b[n][q][m][i] = columns[n].bytes[2 * (kBits == 2 ? m : 2 * q / kGroups) + i] & mask;
    }
#pragma unroll
  for (i32 half = 0; half < 2; ++half)
#pragma unroll
    for (i32 i = 0; i < 2; ++i) {
      u32 low[4], high[4];
      bytes_of(packed[half], 2 * i, own, low);
      bytes_of(packed[half], 2 * i + 1, own, high);
#pragma unroll
      for (i32 q = 0; q < kGroups; ++q) {
        const i32 block = 2 * q / kGroups, at = kBits == 2 ? 0 : 2 * block;
#pragma unroll
        for (i32 n = 0; n < kN; ++n) {
          const i32 start[4] = {0, columns[n].start[q], 0, columns[n].start[q]};
          i32 d[4];
          mma_s8(d, {low[at], high[at], low[at + 1], high[at + 1]}, b[n][q][0], start);
          if (kProducts == 2) mma_s8(d, {low[2], high[2], low[3], high[3]}, b[n][q][kProducts - 1], d);
#pragma unroll
          for (i32 r = 0; r < 2; ++r) {   // below 2^24: 15 * 32 * kLargest
            const float exact = to_float(static_cast<i32>(multiply_add(d[2 * r], 256, d[2 * r + 1])));
            sum[half][i][n][r] = fused_multiply_add(exact, scale_of(packed[half].scales[q], 2 * i + r, columns[n].addend[block]), sum[half][i][n][r]);
          }
        }
      }
    }
}
