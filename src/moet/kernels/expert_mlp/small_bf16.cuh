// Arithmetic of small.cuh for fp8, fp8_row and bf16 rows: bf16 products (weights.cuh).
#pragma once
#include "mlp.cuh"

constexpr i32 kTilePairs = 8, kValues = 4;
constexpr i32 kTiles = 1, kSmallGroups = 4;
constexpr float kAfter = 1.0f;
constexpr i32 kTableBytes = 0;
DEVICE void fill_table(u8*) {}

constexpr i32 kStageChunks = 1, kStageBlocks = 2;
template <i32 kN> struct LoadedRows { u32 b[kN][4][2]; };

// The weights of a warp: a chunk in registers. It is 4 or 8 KiB: 16 warps have 66 KiB or more on their way to a multiprocessor.
template <i32 kWarps, i32 kBefore> struct Stream {   // as small_integer.cuh's
  static constexpr i32 kBytes = 0, kStages = 1;
  Chunk chunk[2];
  bool loaded;

  DEVICE_MEMBER void open(u8*, i32, i32) { loaded = false; }
  DEVICE_MEMBER bool full_up() const { return loaded; }
  DEVICE_MEMBER void after_waiting() const {}
  DEVICE_MEMBER void ask(const u8* at, u32 stride, i32 blocks, i32 g, i32 t) {
#pragma unroll
    for (i32 half = 0; half < 2; ++half) load_chunk(chunk[half], at, blocks > 1 ? at + stride : at, half, g, t);   // one block: any weights, against zeros
    loaded = true;
  }
  DEVICE_MEMBER u32 take() { return 0; }
  DEVICE_MEMBER void give_back() { loaded = false; }
  template <i32 kN> DEVICE_MEMBER void multiply_chunk(u32, i32, const LoadedRows<kN>& in, i32, i32, float (&sum)[2][2][kN][kValues]) {
#pragma unroll
    for (i32 half = 0; half < 2; ++half) accumulate<kN>(chunk[half], in.b, sum[half]);
  }
};

template <i32 kN> struct Inputs {
  using Loaded = LoadedRows<kN>;
  const u16* row[kN];
  i32 columns;
  DEVICE_MEMBER void open(const MlpArgs& a, bool gate_up, const i32* pairs, i32 position, i32 live, i32 g, i32) {
    columns = gate_up ? a.hidden : 32 * a.tiles;
#pragma unroll
    for (i32 n = 0; n < kN; ++n) {
      const i32 own = 8 * n + g;
      row[n] = own >= live ? nullptr : gate_up ? a.x + static_cast<i64>(pairs[position + own] / a.layer.top_k) * a.hidden : a.act + (position + own) * a.act_stride;
    }
  }
  DEVICE_MEMBER void clear(Loaded&) const {}
  DEVICE_MEMBER void load(Loaded& to, i32 chunk, i32, i32 t) const {
#pragma unroll
    for (i32 n = 0; n < kN; ++n) load_activations(row[n], chunk, columns, t, to.b[n]);
  }
};

constexpr i32 kSumColumns = 8;
template <i32 kN> DEVICE void store_sums(float* to, i32 pitch, const float (&sum)[2][2][kN][kValues], i32 g, i32 t) {
#pragma unroll
  for (i32 half = 0; half < 2; ++half)
#pragma unroll
    for (i32 i = 0; i < 2; ++i)
#pragma unroll
      for (i32 n = 0; n < kN; ++n)
#pragma unroll
        for (i32 q = 0; q < 4; ++q) to[(32 * half + 4 * g + 2 * i + q / 2) * pitch + 8 * n + 2 * t + q % 2] = sum[half][i][n][q];
}

DEVICE bool broken_input(const MlpArgs&, bool, i32, i32) { return false; }   // bf16 carries what is not finite
DEVICE void store_act(const MlpArgs& a, i32 position, i32 tile, float v) { a.act[position * a.act_stride + 32 * tile + thread_id() % 32] = to_bf16(v); }
