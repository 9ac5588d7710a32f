// Arithmetic of small.cuh for formats whose levels are small integers: int8 products with two planes of the activations (integers.cuh).
#pragma once
#include "integers.cuh"
#include "mlp.cuh"

constexpr i32 kTiles = 2, kTilePairs = 2, kValues = 2;   // fragments of 8 columns of an item; pairs of one; sums of a lane
constexpr i32 kSmallGroups = 4;                   // of four warps; five of 96 registers were slower (docs/kernels.md)

// The weights of a warp: up to kStages stages asked for, the oldest one multiplied.
template <i32 kWarps, i32 kBefore> struct Stream {   // warps of a block; bytes of shared memory that others take
  // 16 warps x 2 x 2304 bytes are 72 KiB on their way to a multiprocessor, or being read; at 4.5 TB/s it takes 27 in 0.8 us.
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
  DEVICE_MEMBER void after_waiting() const { ring.after_waiting(); }
  DEVICE_MEMBER void ask(const u8* at, u32 stride, i32 blocks, i32, i32) { ring.ask(at, stride, blocks); }
  DEVICE_MEMBER u32 take() { return ring.take(); }
  DEVICE_MEMBER void give_back() { ring.give_back(); }
  template <i32 kN> DEVICE_MEMBER void multiply_chunk(u32 stage, i32 chunk, const Raw (&raw)[kN], i32 g, i32 t, float (&sum)[2][2][kN][kValues]) {
    Packed packed[2];
#pragma unroll
    for (i32 half = 0; half < 2; ++half) load_packed(packed[half], stage + chunk * 2 * kBlockBytes, half, g, t);
    multiply<kN>(packed, raw, g, t, 16 * g + 4 * t, sum);
  }
};

// Where a lane finds the activations of an item's pairs. A column without a pair takes the first one's: nobody reads its sums.
template <i32 kN> struct Inputs {
  using Loaded = Raw[kN];
  const u8 *codes, *blocks;
  u32 own[kN], summed[kN];
  bool mine;
  DEVICE_MEMBER void open(const MlpArgs& a, bool gate_up, const i32* pairs, i32 position, i32 live, i32 g, i32 t) {
    const Planes& planes = gate_up ? a.x_planes : a.act_planes;
    const u32 stride = gate_up ? hidden_padded(a) / 32 : static_cast<u32>(a.act_stride) / 32;
    codes = planes.codes, blocks = reinterpret_cast<const u8*>(planes.blocks);
    mine = matches(g, t);
    const auto row = [&](i32 pair) {
      const i32 at = position + (pair < live ? pair : 0);
      return static_cast<u32>(gate_up ? pairs[at] / a.layer.top_k : at) * stride;
    };
#pragma unroll
    for (i32 n = 0; n < kN; ++n) own[n] = row(2 * n + g / 4) * 64, summed[n] = row(2 * n + t / 2) * static_cast<u32>(sizeof(PlaneBlock));
  }
  DEVICE_MEMBER void clear(Loaded& to) const {
#pragma unroll
    for (i32 n = 0; n < kN; ++n)
#pragma unroll
      for (i32 w = 0; w < 4; ++w) to[n].bytes[w] = 0;
  }
  DEVICE_MEMBER void load(Loaded& to, i32 chunk, i32 g, i32 t) const {
#pragma unroll
    for (i32 n = 0; n < kN; ++n) load_columns(to[n], codes + 128 * chunk, blocks + 2 * sizeof(PlaneBlock) * chunk, own[n], summed[n], mine, g, t);
  }
};

// A lane's sums to where a group adds them up, `pitch` values a row: both parts together, and every other lane stores pair t / 2 of tile n.
constexpr i32 kSumColumns = 2;                    // of a tile
template <i32 kN> DEVICE void store_sums(float* to, i32 pitch, const float (&sum)[2][2][kN][kValues], i32 g, i32 t) {
#pragma unroll
  for (i32 half = 0; half < 2; ++half)
#pragma unroll
    for (i32 i = 0; i < 2; ++i)
#pragma unroll
      for (i32 n = 0; n < kN; ++n)
#pragma unroll
        for (i32 r = 0; r < 2; ++r) {
          const float both = add(sum[half][i][n][r], shuffle_xor(sum[half][i][n][r], 1));   // the same either way round
          if (t % 2 == r) to[(32 * half + 4 * g + 2 * i + r) * pitch + 2 * n + t / 2] = both;
        }
}

DEVICE bool broken_input(const MlpArgs& a, bool gate_up, i32 pair, i32 position) { return gate_up ? a.x_planes.broken[pair / a.layer.top_k] : a.act_planes.broken[position]; }
// A warp: value `lane` of a tile's 32. A last tile without a neighbour in its chunk gets one of zeros.
DEVICE void store_act(const MlpArgs& a, i32 position, i32 tile, float v) {
  const i64 block = position * (a.act_stride / 32) + tile;
  if (!quantize_block(v, a.act_planes.codes + block * 64, a.act_planes.blocks + block) && thread_id() % 32 == 0) a.act_planes.broken[position] = 1;
  if (tile % 2 == 0 && tile == a.tiles - 1) quantize_block(0.0f, a.act_planes.codes + block * 64 + 64, a.act_planes.blocks + block + 1);
}
