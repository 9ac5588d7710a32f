// Arithmetic of small.cuh for formats whose levels are floats: float16 or bf16 products (floats.cuh).
#pragma once
#include "floats.cuh"
#include "mlp.cuh"

constexpr i32 kTiles = 1, kTilePairs = 8;         // fragments of 8 columns of an item; pairs of one
constexpr i32 kPairs = kTiles * kTilePairs, kPitch = kPairs + 1;   // of an item; odd: lanes at one pair hit 32 banks

// Where a lane finds the activations of an item's pairs: columns of pair g, exponents of pairs 2t and 2t + 1; of this warp's next chunk.
struct Inputs {
  static constexpr i32 kStep = 128 * kConsumers;   // bytes of columns from a warp's chunk to its next one; a 16th of that, of exponents

  const u8 *codes, *exponents[2];             // of the item's first chunk
  u32 offset;                                 // of the columns that are next

  // codes_of, exponents_of: rows of the activations, of kPairs pairs. A column without a pair has another one's: nobody reads its sums. first: the chunk to begin with.
  DEVICE_MEMBER void open(const u8* const* codes_of, const u8* const* exponents_of, i32 first, i32 g, i32 t) {
    offset = 0;
    codes = codes_of[g] + (128 * first + 16 * t);
#pragma unroll
    for (i32 q = 0; q < 2; ++q) exponents[q] = exponents_of[2 * t + q] + 8 * first;
  }
  // If `there`.
  template <i32 kN> DEVICE_MEMBER void load(Raw (&to)[kTiles], bool there, bool) {
    const u8* from = further(codes, offset);
    load_vector_if<0>(there, to[0].bytes[0], from);
    load_vector_if<64>(there, to[0].bytes[1], from);
#pragma unroll
    for (i32 q = 0; q < 2; ++q)
      if (kBits == 8) load_double_if<0>(there, to[0].exponent[q][0], to[0].exponent[q][1], further(exponents[q], offset / 16));
    offset += kStep;
  }
};

// A lane's sums to where a group adds them up, `pitch` values a row.
DEVICE void store_sums(float* to, i32 pitch, const float (&sum)[2][2][kTiles][kLaneSums], i32, i32 lane) {
  lane = unknown(lane);                            // computed here: kept through the loop it would be spilled
  const i32 g = lane / 4, t = lane % 4;
  to += 4 * g * pitch + 2 * t;
#pragma unroll
  for (i32 half = 0; half < 2; ++half)
#pragma unroll
    for (i32 i = 0; i < 2; ++i)
#pragma unroll
      for (i32 v = 0; v < kLaneSums; ++v) to[(32 * half + 2 * i + v / 2) * pitch + v % 2] = sum[half][i][0][v];
}
