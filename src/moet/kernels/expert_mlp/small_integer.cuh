// Arithmetic of small.cuh for formats whose levels are small integers: int8 products with two planes of the activations (integers.cuh).
#pragma once
#include "integers.cuh"
#include "mlp.cuh"

constexpr i32 kTilePairs = 4, kValues = 2;        // of a fragment of 8 columns; sums of a lane

// The weights of a warp: up to kStages chunks asked for, the oldest one multiplied.
template <i32 kWarps, i32 kBefore> struct Stream {   // warps of a block; bytes of shared memory that others take
  // 16 warps x 3 x 1152 bytes are 54 KiB on their way to a multiprocessor; at 4.5 TB/s it takes 27 in 0.8 us.
  static constexpr i32 kFit = (kSharedLimit - kBefore) / (kWarps * (kStage + 8)), kStages = kFit < 4 ? kFit : 4;
  static_assert(kStages >= 2);
  static constexpr i32 kBytes = kWarps * kStages * (kStage + 8);
  Ring<kStages> ring;

  DEVICE_MEMBER void open(u8* memory, i32 warp, i32 lane) {
    ring.memory = memory, ring.lane = lane;
    ring.stages = kBefore + warp * kStages * kStage, ring.full = kBefore + kWarps * kStages * kStage + warp * kStages * 8;
    ring.open();
  }
  DEVICE_MEMBER bool full_up() const { return ring.full_up(); }
  DEVICE_MEMBER void ask(const u8* at, u32 stride, i32, i32) { ring.ask(at, stride); }
  template <i32 kN> DEVICE_MEMBER void multiply_oldest(const Raw (&raw)[kN], i32 g, i32 t, float (&sum)[2][2][kN][kValues]) {
    Columns columns[kN];
    const u32 stage = ring.take();
    Packed packed[2];
#pragma unroll
    for (i32 half = 0; half < 2; ++half) load_packed(packed[half], stage, half, g, t);
#pragma unroll
    for (i32 n = 0; n < kN; ++n) arrange(columns[n], raw[n]);
    ring.give_back();
    multiply<kN>(packed, columns, t, 16 * g + 4 * t, sum);
  }
};

// Where a lane finds the activations of an item's pairs. A column without a pair takes the first one's: nobody reads its sums.
template <i32 kN> struct Inputs {
  using Loaded = Raw[kN];
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
  DEVICE_MEMBER void load(Loaded& to, i32 chunk, i32 g, i32 t) const {
#pragma unroll
    for (i32 n = 0; n < kN; ++n) load_columns(to[n], codes + 128 * chunk, blocks + 2 * sizeof(PlaneBlock) * chunk, own[n], summed[n], g, t);
  }
};
DEVICE bool broken_input(const MlpArgs& a, bool gate_up, i32 pair, i32 position) { return gate_up ? a.x_planes.broken[pair / a.layer.top_k] : a.act_planes.broken[position]; }
// A warp: value `lane` of a tile's 32. A last tile without a neighbour in its chunk gets one of zeros.
DEVICE void store_act(const MlpArgs& a, i32 position, i32 tile, float v) {
  const i64 block = position * (a.act_stride / 32) + tile;
  if (!quantize_block(v, a.act_planes.codes + block * 64, a.act_planes.blocks + block) && thread_id() % 32 == 0) a.act_planes.broken[position] = 1;
  if (tile % 2 == 0 && tile == a.tiles - 1) quantize_block(0.0f, a.act_planes.codes + block * 64 + 64, a.act_planes.blocks + block + 1);
}
