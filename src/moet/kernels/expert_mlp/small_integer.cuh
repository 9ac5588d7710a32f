// Arithmetic of small.cuh for formats whose levels are small integers: int8 products with two planes of the activations (integers.cuh).
#pragma once
#include "integers.cuh"
#include "mlp.cuh"

constexpr i32 kTiles = 2, kTilePairs = 2;         // fragments of 8 columns of an item; pairs of one
constexpr i32 kPairs = kTiles * kTilePairs, kPitch = kPairs + 1;   // of an item; odd: lanes at one pair hit 32 banks

// Where a lane finds the activations of an item's pairs: codes of its column's pair, exponents of the pair whose sums it has; of this warp's next chunk.
struct Inputs {
  static constexpr i32 kStep = 128 * kConsumers;   // bytes of codes from a warp's chunk to its next one; a 16th of that, of exponents

  const u8 *codes[kTiles], *exponents[kTiles];   // of the item's first chunk
  u32 offset;                                 // of the codes that are next

  // codes_of, exponents_of: rows of the planes, of kPairs pairs. A column without a pair has another one's: nobody reads its sums. first: the chunk to begin with.
  DEVICE_MEMBER void open(const u8* const* codes_of, const u8* const* exponents_of, i32 first, i32 g, i32 t) {
    offset = 0;
#pragma unroll
    for (i32 n = 0; n < kTiles; ++n) {
      codes[n] = codes_of[2 * n + g / 4] + (128 * first + own_codes(g, t));
      exponents[n] = exponents_of[2 * n + t / 2] + (8 * first + own_exponents(t));
    }
  }
  // If `there`. mine: `there`, and the lane's columns are of its part (matches).
  template <i32 kN> DEVICE_MEMBER void load(Raw (&to)[kTiles], bool there, bool mine) {
#pragma unroll
    for (i32 n = 0; n < kN; ++n) load_columns(to[n], further(codes[n], offset), further(exponents[n], offset / 16), mine, there);
    offset += kStep;
  }
};

// A lane's sums to where a group adds them up, `pitch` values a row: both parts together, of pair t / 2 of tile n; of two rows a lane has one, and its neighbour the other.
DEVICE void store_sums(float* to, i32 pitch, const float (&sum)[2][2][kTiles][kLaneSums], i32 tiles, i32 lane) {
  lane = unknown(lane);                            // computed here: kept through the loop it would be spilled
  const i32 g = lane / 4, t = lane % 4;
  to += (4 * g + t % 2) * pitch + t / 2;
#pragma unroll
  for (i32 n = 0; n < kTiles; ++n) {
    if (n >= tiles) break;
#pragma unroll
    for (i32 half = 0; half < 2; ++half)
#pragma unroll
      for (i32 i = 0; i < 2; ++i) {
        const float* v = sum[half][i][n];
        const float kept = t % 2 ? v[1] : v[0], given = t % 2 ? v[0] : v[1];
        to[(32 * half + 2 * i) * pitch + 2 * n] = add(kept, shuffle_xor(given, 1));   // the same either way round
      }
  }
}
