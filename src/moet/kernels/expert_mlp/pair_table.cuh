// tcq2 on Hopper: two weights are looked up at a time. Two neighbouring columns' levels depend on 6 bits, so the table has 64 entries of two bf16, each 32 times,
// for every lane a bank of its own: 8 KiB. A look-up is a shift, a mask that ors the lane's place in, and a load. Permuting bytes takes 27 operations for 16
// columns that only half of the lanes a clock can do, this 14, and a fifth fewer instructions in all. Tables for sym2 and mxfp4, which permute and shift into
// bf16 with less, were slower or level.
#pragma once
#include "../gpu/hopper.cuh"
#include "columns.cuh"

constexpr bool kPairTable = kFormat == kTcq2;
constexpr i32 kPairTableBytes = kPairTable ? 64 * 128 : 0;

// All threads; they meet before it is read.
DEVICE void make_pair_table(u8* table) {
  for (i32 i = thread_id(); i < kPairTableBytes / 4; i += thread_count()) {
    u32 both = 0;
    for (i32 k = 0; k < 2; ++k) {
      const u32 code = static_cast<u32>(i) >> (5 + 2 * k) & 15;
      const u32 four = code < 4 ? 0x070d1b13u : code < 8 ? 0x1117010bu : code < 12 ? 0x151f090fu : 0x0d051319u;   // levels + 16 (docs/row-format.md)
      both |= as_bits(to_float(static_cast<i32>(four >> (8 * (code & 3)) & 255) - 16)) >> 16 << (16 * k);
    }
    reinterpret_cast<u32*>(table)[i] = both;
  }
}
// As decode_sixteen. lane: 4 bytes a lane.
DEVICE void look_up_sixteen(const Sixteen& s, SharedAt table, u32 lane, u32 (&pair)[8]) {
  const u32 scale = multiply_add(s.scale, 0x100010u, ((112u - 24u) << 7) * 0x10001u), word = s.word[0];   // UE5M3 as bf16; kUnit takes the 2^-24 back
#pragma unroll
  for (i32 r = 0; r < 8; ++r) {   // bits 4r .. 4r + 5; the last two columns go on with the sign
    const u32 shifted = r == 0 ? word << 7 : r == 1 ? word << 3 : r < 7 ? word >> (4 * r - 7) : static_cast<u32>(static_cast<i32>(word) >> 21);
    pair[r] = multiply_bf16x2(load_word_at(table, (shifted & 0x1f80u) | lane), scale);
  }
}
