// The finisher of a group of mlp_small (small.cuh), one warp: adds up the consumers' sums of an item, in their order; values between gate/up and down go to
// `act` as planes, answers to `y`. It tells others what is there, and adds up the places of a strip of the hidden columns that it is the last one to complete.
#pragma once
#include "combine.cuh"
#include "group.cuh"

// A warp: value `lane` of a tile's 32. A last tile without a neighbour in its chunk gets one of zeros.
DEVICE void store_act(const MlpArgs& a, i32 position, i32 tile, float v) {
  const i64 block = position * (a.act_stride / 32) + tile;
  u8* codes = a.act_planes.codes + block * 64;
  i32* exponent = a.act_planes.exponents + block;
  if (!quantize_block<kNumbers>(v, codes, exponent) && thread_id() % 32 == 0) a.act_planes.broken[position] = 1;
  if (tile % 2 == 0 && tile == a.tiles - 1) quantize_block<kNumbers>(0.0f, codes + 64, exponent + 1);
}
// What a row's sums lack: its matrix's multiplier, and fp8_row's scale of the row, 0 .. 63 of the strip.
DEVICE float row_factor(const MlpArgs& a, const u8* row, i32 which, const u8* strip, i32 of_strip) {
  const float whole = multiplier(a, row, which);
  return kFormat == kFp8Row ? multiply(whole, load_float(strip + kCodeBytes + 4 * of_strip)) : whole;
}

struct Finisher {
  static constexpr i32 kAtOnce = 4;        // pairs, whose sums are in registers

  const MlpArgs& args;
  Group& group;
  const i32 lane;

  DEVICE_MEMBER float total(i32 row, i32 pair) {
    float v = 0.0f;
#pragma unroll
    for (i32 w = 0; w < kConsumers; ++w) v = add(v, group.sums[w][row * kPitch + pair]);
    return multiply(v, kAfter);
  }
  // Rows lane and 32 + lane of pairs `from` and after it, once they are there; behind the last one the consumers may store the next item's.
  DEVICE_MEMBER void take_sums(u32 parity, i32 from, i32 count, float (&sum)[kAtOnce][2]) {
    constexpr i32 kTogether = kTilePairs < kAtOnce ? kTilePairs : kAtOnce;
    if (from == 0) barrier_wait(&group.summed, parity);
#pragma unroll
    for (i32 p = 0; p < kAtOnce; ++p) {
      if (p % kTogether == 0 && from + p >= count) break;
#pragma unroll
      for (i32 half = 0; half < 2; ++half) sum[p][half] = total(32 * half + lane, from + p);
    }
    if (from + kAtOnce >= count) barrier_arrive(&group.spare);
  }
  DEVICE_MEMBER void finish_gate_up(const Told& told, u32 parity) {
    const u8* row = told.row;
    const Item& item = told.item;
    const Strip strip = {told.strip, told.stride, told.blocks};
    const float first = row_factor(args, row, 0, told.strip, lane), second = row_factor(args, row, 1, told.strip, 32 + lane), bias[2] = {tile_bias(args, strip, 0, lane), tile_bias(args, strip, 1, lane)};
    const bool there = 32 * (args.tile_begin + item.strip) + lane < args.inter;
    const u32 broken = lane < item.count ? *told.broken[lane] : 0, spoilt = ballot(broken != 0);
#pragma unroll 1
    for (i32 from = 0; from < kPairs && from < item.count; from += kAtOnce) {
      float sum[kAtOnce][2] = {};
      take_sums(parity, from, item.count, sum);
#pragma unroll
      for (i32 p = 0; p < kAtOnce; ++p) {
        if (from + p >= item.count) break;
        const float gate = fused_multiply_add(sum[p][0], first, bias[0]), up = fused_multiply_add(sum[p][1], second, bias[1]);
        store_act(args, item.position + from + p, item.strip, spoilt >> (from + p) & 1 ? not_a_number() : there ? activate(args, gate, up) : 0.0f);
      }
    }
  }
  DEVICE_MEMBER void finish_down(const Told& told, u32 parity) {
    const u8* row = told.row;
    const Item& item = told.item;
    const i32 column = 64 * item.strip + lane;
    float factor[2], bias[2];
#pragma unroll
    for (i32 half = 0; half < 2; ++half) factor[half] = row_factor(args, row, 2, told.strip, 32 * half + lane);
#pragma unroll
    for (i32 half = 0; half < 2; ++half) bias[half] = column + 32 * half < args.hidden ? down_bias(args, row, column + 32 * half) : 0.0f;
    const u32 broken = lane < item.count ? *told.broken[lane] : 0, spoilt = ballot(broken != 0);
    const bool readable = told.chunks;
#pragma unroll 1
    for (i32 from = 0; from < kPairs && from < item.count; from += kAtOnce) {
      float sum[kAtOnce][2] = {};
      if (readable) take_sums(parity, from, item.count, sum);
#pragma unroll
      for (i32 p = 0; p < kAtOnce; ++p) {
        if (from + p >= item.count) break;
        u16* y = args.y + static_cast<i64>(told.pair[from + p]) * args.hidden + column;
#pragma unroll
        for (i32 half = 0; half < 2; ++half)
          if (column + 32 * half < args.hidden)
            y[32 * half] = to_bf16(!readable ? 0.0f : spoilt >> (from + p) & 1 ? not_a_number() : fused_multiply_add(sum[p][half], factor[half], bias[half]));
      }
    }
  }
  // Behind finish_down. Whoever comes last combines.
  DEVICE_MEMBER void combine_strip(const Item& item) {
    Plan& plan = *args.layer.plan;
    if (!args.combines || args.wave != plan.waves - 1) return;
    sync_warp();
    const bool last = lane == 0 && draw_release_gpu(&plan.finished[item.strip]) + 1 == static_cast<u32>(item.tiles);
    if (!ballot(last)) return;
    fence_gpu();
    combine_tokens(args, item.strip, lane, 32);
  }
  DEVICE_MEMBER void run() {
    Place<kItems> place = {0};
    for (u32 parity = 0;; ++place.number) {   // of `summed`: items that are multiplied
      barrier_wait(&group.ready[place.at()], place.parity());
      const Told& told = group.told[place.at()];
      const Item& item = told.item;
      if (item.kind == kNothingLeft) return;
      if (item.kind == kDown) {
        finish_down(told, parity);
        combine_strip(item);
      } else {
        if (told.chunks) finish_gate_up(told, parity);
        sync_warp();
        if (lane == 0) add_release_gpu(&args.layer.plan->made[item.step], 1);
      }
      parity ^= told.chunks != 0;
      barrier_arrive(&group.heard[place.at()]);
    }
  }
};
