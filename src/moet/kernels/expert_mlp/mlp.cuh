// What the kernels of the expert MLP share: where a strip's blocks lie, the function between the two GEMMs, and how work is handed out.
//
// A strip is 64 rows of weights over all columns. Of w13 it is a tile: 32 gate rows and the 32 up rows of the same values, so that one block has both. Each
// (token, place) pair has its own row in `act` and `y`: nothing depends on which pairs are computed together, or when.
#pragma once
#include "../paging/fetch.cuh"
#include "args.cuh"
#include "weights.cuh"

constexpr i32 kConsumers = 4;   // warps of small.cuh that share the K of an item

DEVICE u16 to_bf16(float v) { return static_cast<u16>(pack_bf16(v, 0.0f)); }
DEVICE float not_a_number() { return as_float(0x7fc00000u); }

// The blocks of a strip: block k (32 columns) is at `at + k * stride`.
struct Strip {
  const u8* at;
  i64 stride;
  i32 blocks;
};
DEVICE const u8* block_of(const Strip& s, i32 k) { return s.at + (k < s.blocks ? k : s.blocks - 1) * s.stride; }   // past the end: any weights, against zeros
DEVICE const u8* row_of(const MlpArgs& a, const Step& step) { return a.layer.slots->pool + step.slot * a.layer.slots->slot_bytes; }
DEVICE Strip w13_strip(const MlpArgs& a, const u8* row, i32 tile) {
  const i32 blocks = hidden_padded(a) / 32;
  return {row + a.w13 + tile * (static_cast<i64>(blocks) * kBlockBytes + (a.biased ? 256 : 0)), kBlockBytes, blocks};
}
DEVICE Strip w2_strip(const MlpArgs& a, const u8* row, i32 strip) {
  return {row + a.w2 + static_cast<i64>(strip) * kBlockBytes, static_cast<i64>(hidden_padded(a) / 64) * kBlockBytes, a.tiles};
}
DEVICE float multiplier(const MlpArgs& a, const u8* row, i32 which) { return load_float(row + a.extras + 4 * which); }
DEVICE float down_bias(const MlpArgs& a, const u8* row, i32 n) { return a.biased && a.adds_bias ? load_float(row + a.extras + 16 + 4 * n) : 0.0f; }
// Of value v (0 .. 31) of a w13 tile whose blocks end at `end`; which: 0 gate, 1 up.
DEVICE float tile_bias(const MlpArgs& a, const Strip& s, i32 which, i32 v) { return a.biased ? load_float(s.at + s.blocks * s.stride + 4 * (32 * which + v)) : 0.0f; }

// Without a branch: in an epilogue that is unrolled they cost more than what they spare. A NaN stays one.
DEVICE float activate(const MlpArgs& a, float gate, float up) {
  const float limit = a.limited ? a.limit : as_float(0x7f800000u), alpha = a.oai ? a.alpha : 1.0f, shift = a.oai ? 1.0f : 0.0f;
  gate = gate > limit ? limit : gate;
  up = up > limit ? limit : up < -limit ? -limit : up;
  return multiply(divide(gate, add(1.0f, exponential(-multiply(alpha, gate)))), add(up, shift));
}

// Work of one launch: steps of the wave x token tiles x strips, handed out in that order. All threads of a block draw together.
struct Work {
  i32 step, end;            // of the wave
  i32 before, first;        // items of the steps before `step`; the item drawn
  i32 token_tile, strip;    // of the item
};
DEVICE i32 items_of(const Step& s, i32 tokens, i32 many, i32 strips) { return s.pair_count < many ? 0 : (s.pair_count + tokens - 1) / tokens * strips; }
DEVICE Work start(const Plan& plan, i32 wave) { return {plan.wave_begin[wave], plan.wave_begin[wave + 1], 0, -1, 0, 0}; }
// False: the launch is done. tokens: a tile's; many: pairs of a step that belongs to this launch, at least; strips: of a step, or groups of strips.
DEVICE bool draw(Plan& plan, u32* counter, i32 tokens, i32 many, i32 strips, Work& work) {
  SHARED(i32, drawn);
  sync_block();   // the item before is done with its shared memory
  if (thread_id() == 0) drawn = static_cast<i32>(atomic_add_gpu(counter, 1));
  sync_block();
  work.first = drawn;
  while (work.step < work.end) {
    const i32 items = items_of(plan.steps[work.step], tokens, many, strips);
    if (work.first < work.before + items) {
      const i32 inside = work.first - work.before;
      work.token_tile = inside / strips;
      work.strip = inside % strips;
      return true;
    }
    work.before += items;
    ++work.step;
  }
  return false;
}

// The first GEMM's blocks draw a ticket when they begin, and the first ones fetch the wave's missing rows: a block that waits for a row then waits for blocks
// that run already.
DEVICE void fetch_first(const MlpArgs& a) {
  SHARED(u32, ticket);
  Plan& plan = *a.layer.plan;
  if (!a.fetchers || !plan.misses) return;
  if (thread_id() == 0) ticket = atomic_add_gpu(&plan.ticket[a.wave], 1);
  sync_block();
  if (ticket < static_cast<u32>(a.fetchers)) fetch_rows(a.layer, a.wave, static_cast<i32>(ticket), a.fetchers);
}
// Where mlp_small begins while gate_up_large still runs, it does not end before that: what follows it needs both.
DEVICE void end_beside(const MlpArgs& a) {
  if (a.beside) wait_for_launch_before();
}
// Whether the row of a step of the first GEMM is there, after waiting for it if it is on its way.
DEVICE bool readable(const MlpArgs& a, i32 step, u64& waited) {
  return a.fetchers ? wait_row(a.layer, step, a.fetchers, waited) : !row_failed(*a.layer.plan, step);
}
