// Arithmetic of small.cuh for formats whose levels are small integers: int8 products with two planes of the activations (integers.cuh).
#pragma once
#include "integers.cuh"
#include "mlp.cuh"

constexpr i32 kTilePairs = 4, kValues = 2;        // of a fragment of 8 columns; sums of a lane
constexpr i32 kAhead = kBits == 2 ? 3 : 2;        // chunks on their way to a warp: 16 warps x 3 x 1152 bytes, 54 KiB a multiprocessor (it takes 27 at 4.5 TB/s)

using Weights = Packed[2];
// at: the chunk's first block, alike in all lanes; stride: from it to the second one.
DEVICE void load_weights(Weights& w, const u8* at, u32 stride, i32 g, i32 t) {
#pragma unroll
  for (i32 half = 0; half < 2; ++half) load_packed(w[half], at, stride, half, g, t);
}

// Where a lane finds the activations of an item's pairs. A column without a pair takes the first one's: nobody reads its sums.
template <i32 kN> struct Inputs {
  const u8 *codes, *blocks;
  u32 own[kN], summed[kN];
  DEVICE_MEMBER void open(const MlpArgs& a, bool gate_up, const i32* pairs, i32 position, i32 live, i32 g, i32 t) {
    const Planes& planes = gate_up ? a.x_planes : a.act_planes;
    const u32 stride = gate_up ? hidden_padded(a) / 32 : static_cast<u32>(a.act_stride) / 32;
    codes = planes.codes, blocks = reinterpret_cast<const u8*>(planes.blocks);
    const auto row = [&](i32 pair) {
      const i32 at = position + (pair < live ? pair : 0);
      return static_cast<u32>(gate_up ? pairs[at] / a.layer.top_k : at) * stride;
    };
#pragma unroll
    for (i32 n = 0; n < kN; ++n) own[n] = row(4 * n + g / 2) * 64, summed[n] = row(4 * n + t) * static_cast<u32>(sizeof(PlaneBlock));
  }
};
template <i32 kN> DEVICE void multiply_weights(const Weights& w, const Inputs<kN>& in, i32 chunk, i32 g, i32 t, float (&sum)[2][2][kN][kValues]) {
  Columns columns[kN];
#pragma unroll
  for (i32 n = 0; n < kN; ++n) load_columns(columns[n], in.codes + 128 * chunk, in.blocks + 2 * sizeof(PlaneBlock) * chunk, in.own[n], in.summed[n], g, t);
  multiply<kN>(w, columns, t, 16 * g + 4 * t, sum);
}

DEVICE bool broken_input(const MlpArgs& a, bool gate_up, i32 pair, i32 position) { return gate_up ? a.x_planes.broken[pair / a.layer.top_k] : a.act_planes.broken[position]; }
// A warp: value `lane` of a tile's 32. A last tile without a neighbour in its chunk gets one of zeros.
DEVICE void store_act(const MlpArgs& a, i32 position, i32 tile, float v) {
  const i64 block = position * (a.act_stride / 32) + tile;
  if (!quantize_block(v, a.act_planes.codes + block * 64, a.act_planes.blocks + block) && thread_id() % 32 == 0) a.act_planes.broken[position] = 1;
  if (tile % 2 == 0 && tile == a.tiles - 1) quantize_block(0.0f, a.act_planes.codes + block * 64 + 64, a.act_planes.blocks + block + 1);
}
