// The two GEMMs for many tokens an expert (prefill), on Hopper: wgmma, with weights decoded into registers and activations in shared memory.
//
// A block stays: two warpgroups each take two strips of 64 rows and up to 128 pairs, and a third one brings both operands, chunk of 64 columns after chunk,
// through a ring of stages, past the end of a panel into the next one. A warpgroup decodes one strip's chunk while its other strip's product is under way.
//
// Activations lie arranged (columns.cuh): x since `arrange`, act since gate_up_large stored it. Scales are in the weights, exactly, but for FP8: a row's scale
// multiplies the sum, and scales of 32 x 32 granules the sum of the columns that share them.
#pragma once
#include "../gpu/hopper.cuh"
#include "columns.cuh"
#include "panels.cuh"

namespace hopper {
constexpr i32 kMostPairs = kFormat == kFp8 ? 64 : 128;   // FP8 keeps two sums
constexpr i32 kSums = kMostPairs / 2;                    // of a thread and strip
constexpr i32 kStrips = 4, kConsumerThreads = 64 * kStrips;   // a warpgroup for two strips
constexpr i32 kTileBytes = kMostPairs * 128, kStageBytes = (kTileBytes + kStrips * 2 * kBlockBytes + 1023) / 1024 * 1024;
constexpr i32 kRingBytes = 222 << 10;   // of 227 KiB; cuda.py asks for them, and 1 KiB to align
constexpr i32 kStages = kRingBytes / kStageBytes < 8 ? kRingBytes / kStageBytes : 8;
constexpr i32 kCopying = 128;   // threads
constexpr i32 kPanels = 2;

struct Ring {
  u64 full[kStages], empty[kStages];   // a stage's
  u64 told[kPanels], heard[kPanels];   // of `panel`
  Panel panel[kPanels];
  Constants constant[2];               // alike; who does not know which one a lane reads does not take them for one value of the warp
};
struct Cursor {
  i32 stage;
  u32 parity;
};
DEVICE void advance(Cursor& c) {
  if (++c.stage == kStages) c.stage = 0, c.parity ^= 1;
}

template <bool kDown> DEVICE i32 strips_of(const MlpArgs& a) { return kDown ? hidden_padded(a) / 64 : a.tiles; }
template <bool kDown> DEVICE i32 chunks_of(const MlpArgs& a) { return kDown ? (a.tiles + 1) / 2 : hidden_padded(a) / 64; }

DEVICE void release(Ring& ring, i32 stage) {   // a warp's
  if (thread_id() % 32 == 0) barrier_arrive(&ring.empty[stage]);
}

// The four copying warps: lane l of warp w copies unit l % 8 of rows 4w + l / 8 and every 16th from there on, and strip w's blocks (bulk
// copies of a block cost 155 clocks each and 3 for a line, one after the other: 1,400 a chunk). The first warp finds the panels.
template <bool kDown> DEVICE void produce(const MlpArgs& args, Ring& ring, u8* stages) {
  Plan& plan = *args.layer.plan;
  const i32 lane = thread_id() % 32, warp = (thread_id() - kConsumerThreads) / 32, unit = lane % 8, row = 4 * warp + lane / 8;
  const i32 strips = strips_of<kDown>(args), chunks = chunks_of<kDown>(args);
  const u8* rows = kDown ? reinterpret_cast<const u8*>(args.act) : args.x_planes.codes;
  const u32 stride = static_cast<u32>(kDown ? args.act_stride : hidden_padded(args)) / 8;   // in 16 bytes
  const i32 to = row * 128 + (unit ^ (row & 7)) * 16;
  Cursor next = {0, 0};
  u64 waited = 0;
  Walk walk = begin_walk(plan, args.wave);
  u32* counter = &plan.item[kDown][args.wave];
  i32 drawn = warp == 0 && lane == 0 ? static_cast<i32>(draw_gpu(counter)) : 0;
  for (i32 number = 0;; ++number) {
    const i32 slot = number % kPanels;
    Panel panel;
    if (warp == 0) {
      for (;;) {
        panel = panel_of(plan, walk, shuffle(drawn, 0), kMostPairs, strips, kStrips);
        if (panel.step < 0) break;
        if (lane == 0) {
          drawn = static_cast<i32>(draw_gpu(counter));
          panel.readable = !kDown && args.fetchers ? await_row(args.layer, panel.step, args.fetchers, waited) : !row_failed(plan, panel.step);
        }
        panel.readable = shuffle(panel.readable, 0);
        if (kDown || panel.readable) break;
      }
      sync_warp();   // what lane 0 has seen: a row that other blocks have brought
      barrier_wait(&ring.heard[slot], (number / kPanels & 1) ^ 1);
      if (lane == 0) {
        ring.panel[slot] = panel;
        barrier_arrive(&ring.told[slot]);
      }
    } else {
      barrier_wait(&ring.told[slot], number / kPanels & 1);
      panel = ring.panel[slot];
      barrier_arrive(&ring.heard[slot]);
    }
    if (panel.step < 0) break;
    if (!panel.readable) continue;
    u32 from[kMostPairs / 16];
#pragma unroll
    for (i32 k = 0; k < kMostPairs / 16; ++k) {
      const i32 pair = panel.position + 16 * k + row;
      if (16 * k + row < panel.count) from[k] = static_cast<u32>(kDown ? pair : plan.pairs[pair] / args.layer.top_k) * stride + static_cast<u32>(unit);
    }
    const u8* row_bytes = row_of(args, plan.steps[panel.step]);
    const i32 own = panel.strip + warp < strips ? panel.strip + warp : strips - 1;   // a warp copies a strip; past the end: any
    const Strip strip = kDown ? w2_strip(args, row_bytes, own) : w13_strip(args, row_bytes, own);
    for (i32 c = 0; c < chunks; ++c, advance(next)) {
      u8* stage = stages + next.stage * kStageBytes;
      const u8 *first = block_of(strip, 2 * c), *second = block_of(strip, 2 * c + 1);
      barrier_wait(&ring.empty[next.stage], next.parity ^ 1);
      constexpr i32 kUnits = kBlockBytes / 16;
#pragma unroll
      for (i32 i = 0; i < (2 * kUnits + 31) / 32; ++i) {
        const i32 u = 32 * i + lane;
        if (u < 2 * kUnits) copy_async16(stage + kTileBytes + warp * 2 * kBlockBytes + 16 * u, u < kUnits ? first + 16 * u : second + 16 * (u - kUnits));
      }
#pragma unroll
      for (i32 k = 0; k < kMostPairs / 16; ++k) {
        if (16 * k >= panel.count) break;
        if (16 * k + row < panel.count) copy_async16(stage + to + k * 2048, rows + static_cast<u64>(from[k]) * 16 + c * 128);
      }
      copies_arrive(&ring.full[next.stage]);
    }
  }
  if (waited) maximum_gpu(&plan.stall[args.wave], waited);
}

// The rows of a strip that a thread has: of gate_up a gate row and the up row of the same value, of down two in a row.
template <bool kDown> DEVICE i32 row_of_thread(i32 which) {
  const i32 warp = thread_id() % 128 / 32, g = thread_id() % 32 / 4;
  return kDown ? 16 * warp + 2 * g + which : 32 * which + 8 * warp + g;
}

// What a thread decodes of a chunk: its two rows.
struct Coded { Sixteen row[2]; };
template <bool kDown> DEVICE void load_coded(Coded& to, const u8* weights) {
#pragma unroll
  for (i32 i = 0; i < 2; ++i) load_sixteen(to.row[i], weights, row_of_thread<kDown>(i), thread_id() % 4);
}
// The A fragments: a[4 s + i] is register i of product s.
DEVICE void decode_coded(const Coded& from, const Constants& constant, u32 (&a)[16]) {
#pragma unroll
  for (i32 i = 0; i < 2; ++i) {
    u32 pair[8];
    decode_sixteen(from.row[i], constant, pair);
#pragma unroll
    for (i32 r = 0; r < 8; ++r) a[4 * (r >> 1) + 2 * (r & 1) + i] = pair[r];
  }
}

// The stage is full: its address.
DEVICE u8* await_stage(Ring& ring, u8* stages, const Cursor& at) {
  barrier_wait(&ring.full[at.stage], at.parity);
  fence_async_shared();   // what copies brought, to wgmma: here, since in the copying warps it waits for all that is on its way
  return stages + at.stage * kStageBytes;
}

// sum[strip][4 j + 2 i + q]: the thread's row i, pair 8 j + 2 t + q. One strip is decoded while the other one's product is under way.
template <bool kDown> DEVICE void multiply_panel(Ring& ring, u8* stages, Cursor& at, i32 chunks, i32 units, float (&sum)[2][kSums]) {
  const i32 weights = kTileBytes + thread_id() / 128 * 4 * kBlockBytes;
  const Constants constant = ring.constant[thread_id() & 1];
  u32 a[2][16];
  i32 before = 0;
#pragma unroll
  for (i32 i = 0; i < kSums; ++i) sum[0][i] = sum[1][i] = 0.0f;
  for (i32 c = 0; c < chunks; ++c) {
    u8* stage = await_stage(ring, stages, at);
    Coded coded[2];
#pragma unroll
    for (i32 strip = 0; strip < 2; ++strip)
      if (kBits < 16) load_coded<kDown>(coded[strip], stage + weights + strip * 2 * kBlockBytes);
#pragma unroll
    for (i32 strip = 0; strip < 2; ++strip) {
      if (kBits == 16) load_coded<kDown>(coded[strip], stage + weights + strip * 2 * kBlockBytes);   // BF16's codes are the fragments: registers of the last product
      decode_coded(coded[strip], constant, a[strip]);
      multiply_tile<4>(sum[strip], a[strip], tile_descriptor(stage), units, true);
      products_wait<1>();   // the other strip's: its registers are free
      if (strip == 0 && c) release(ring, before);
    }
    before = at.stage;
    advance(at);
  }
  products_wait<0>();
  settle(sum[0]);
  settle(sum[1]);
  release(ring, before);
}

// The same for scales of 32 x 32 granules: products go on in `part` for as long as both granules' scales are what they were.
template <bool kDown> DEVICE void multiply_panel_granules(Ring& ring, u8* stages, Cursor& at, i32 chunks, i32 units, float (&sum)[2][kSums]) {
  const i32 group = thread_id() / 128, half = thread_id() % 128 / 64;
  const Constants constant = ring.constant[thread_id() & 1];
  float part[2][kSums], scale[2][2] = {};
#pragma unroll
  for (i32 i = 0; i < kSums; ++i) sum[0][i] = sum[1][i] = part[0][i] = part[1][i] = 0.0f;
  const auto add_part = [&](i32 strip) {
    products_wait<0>();
    settle(part[strip]);
#pragma unroll
    for (i32 i = 0; i < kSums; ++i) sum[strip][i] = fused_multiply_add(part[strip][i], scale[strip][kDown ? half : i >> 1 & 1], sum[strip][i]);
  };
  for (i32 c = 0; c < chunks; ++c, advance(at)) {
    u8* stage = await_stage(ring, stages, at);
    const TileDescriptor tile = tile_descriptor(stage);
#pragma unroll
    for (i32 strip = 0; strip < 2; ++strip) {
      const u8* weights = stage + kTileBytes + (2 * group + strip) * 2 * kBlockBytes;
      u32 a[16];
      Coded coded;
      load_coded<kDown>(coded, weights);
      decode_coded(coded, constant, a);
#pragma unroll
      for (i32 b = 0; b < 2; ++b) {
        const float low = load_float(weights + b * kBlockBytes + kCodeBytes), high = load_float(weights + b * kBlockBytes + kCodeBytes + 4);
        const bool goes_on = (c || b) && low == scale[strip][0] && high == scale[strip][1];
        if ((c || b) && !goes_on) add_part(strip);
        scale[strip][0] = low, scale[strip][1] = high;
        multiply_tile<2>(part[strip], a + 8 * b, tile + 2 * b * kDescriptorStep, units, goes_on);
      }
      products_wait<0>();
    }
    release(ring, at.stage);
  }
  add_part(0);
  add_part(1);
}

// What stands before the sum of row i: FP8's scale of the row, and the matrix's own.
template <bool kDown> DEVICE float factor(const MlpArgs& args, const u8* row, const Strip& strip, i32 i) {
  const float whole = multiply(multiplier(args, row, kDown ? 2 : i), kUnit);
  return kFormat == kFp8Row ? multiply(whole, load_float(strip.at + kCodeBytes + 4 * row_of_thread<kDown>(i))) : whole;
}

// The sums of a strip go where they belong.
DEVICE void store_down(const MlpArgs& args, const Panel& panel, const u8* row, i32 number, const float (&sum)[kSums]) {
  const i32 t = thread_id() % 4, column = 64 * number + row_of_thread<true>(0);   // and the next one: hidden is even
  if (column >= args.hidden) return;
  const Strip strip = w2_strip(args, row, number);
  const float factors[2] = {factor<true>(args, row, strip, 0), factor<true>(args, row, strip, 1)};
  const float bias[2] = {down_bias(args, row, column), down_bias(args, row, column + 1)};
#pragma unroll
  for (i32 j = 0; j < kSums / 4; ++j) {
    if (8 * j >= panel.count) return;
#pragma unroll
    for (i32 q = 0; q < 2; ++q) {
      const i32 pair = 8 * j + 2 * t + q;
      if (pair >= panel.count) continue;
      const u32 both = pack_bf16(fused_multiply_add(sum[4 * j + q], factors[0], bias[0]), fused_multiply_add(sum[4 * j + 2 + q], factors[1], bias[1]));
      *reinterpret_cast<u32*>(args.y + static_cast<i64>(args.layer.plan->pairs[panel.position + pair]) * args.hidden + column) = both;
    }
  }
}
DEVICE void store_gate_up(const MlpArgs& args, const Panel& panel, const u8* row, i32 number, const float (&sum)[kSums]) {
  const i32 t = thread_id() % 4, value = row_of_thread<false>(0), column = 32 * number + value;
  if (column >= args.act_stride) return;   // zeros up to there
  const bool there = number < args.tiles && 32 * args.tile_begin + column < args.inter, second = value & kApart;
  const Strip strip = w13_strip(args, row, number < args.tiles ? number : 0);
  const float factors[2] = {factor<false>(args, row, strip, 0), factor<false>(args, row, strip, 1)};
  const float bias[2] = {tile_bias(args, strip, 0, value), tile_bias(args, strip, 1, value)};
  const i64 step = 8 * args.act_stride;
  u16* to = args.act + (panel.position + 2 * t + second) * args.act_stride + column / 64 * 64 + place_of(column % 64);
#pragma unroll
  for (i32 j = 0; j < kSums / 4; ++j, to += step) {
    if (8 * j >= panel.count) return;
    float v[2];
#pragma unroll
    for (i32 q = 0; q < 2; ++q)
      v[q] = activate(args, fused_multiply_add(sum[4 * j + q], factors[0], bias[0]), fused_multiply_add(sum[4 * j + 2 + q], factors[1], bias[1]));
    // The pair's other value is another lane's: one of them stores both of pair 2t, the other one those of 2t + 1.
    const u32 mine = there ? pack_bf16(v[0], v[1]) : 0, other = shuffle_xor(mine, 4 * kApart);
    if (8 * j + 2 * t + second < panel.count) *reinterpret_cast<u32*>(to) = second ? permute_bytes(other, mine, 0x7632) : permute_bytes(mine, other, 0x5410);
  }
}

// A warpgroup's two strips of a panel.
template <bool kDown> DEVICE void consume(const MlpArgs& args, Ring& ring, u8* stages, Cursor& at, const Panel& panel) {
  float sum[2][kSums];
  const i32 units = uniform((panel.count + 15) / 16);
  if constexpr (kFormat == kFp8) multiply_panel_granules<kDown>(ring, stages, at, chunks_of<kDown>(args), units, sum);
  else multiply_panel<kDown>(ring, stages, at, chunks_of<kDown>(args), units, sum);
  const u8* row = row_of(args, args.layer.plan->steps[panel.step]);
#pragma unroll
  for (i32 i = 0; i < 2; ++i) {
    const i32 number = panel.strip + 2 * (thread_id() / 128) + i;
    if constexpr (kDown) store_down(args, panel, row, number, sum[i]);
    else store_gate_up(args, panel, row, number, sum[i]);
  }
}

// The answers of an expert whose row is lost.
DEVICE void store_zeros(const MlpArgs& args, const Panel& panel) {
  const i32 column = 64 * panel.strip + 2 * (thread_id() % 128);   // 128 threads, 4 strips
  if (column >= args.hidden) return;
  for (i32 pair = thread_id() / 128; pair < panel.count; pair += kConsumerThreads / 128)
    *reinterpret_cast<u32*>(args.y + static_cast<i64>(args.layer.plan->pairs[panel.position + pair]) * args.hidden + column) = 0;
}

template <bool kDown> DEVICE void run(const MlpArgs& args, u8* memory) {
  SHARED(Ring, ring);
  u8* stages = align_shared(memory);
  if (thread_id() == 0) {
    for (i32 i = 0; i < kStages; ++i) barrier_init(&ring.full[i], kCopying), barrier_init(&ring.empty[i], kConsumerThreads / 32);
    for (i32 i = 0; i < kPanels; ++i) barrier_init(&ring.told[i], 1), barrier_init(&ring.heard[i], kConsumerThreads + kCopying - 32);
    ring.constant[0] = ring.constant[1] = constants();
    barriers_ready();
  }
  sync_block();
  if (thread_id() >= kConsumerThreads) {
    fewer_registers<40>();
    return produce<kDown>(args, ring, stages);
  }
  more_registers<232>();
  Cursor at = {0, 0};
  for (i32 number = 0;; ++number) {
    const i32 slot = number % kPanels;
    barrier_wait(&ring.told[slot], number / kPanels & 1);
    const Panel panel = ring.panel[slot];
    barrier_arrive(&ring.heard[slot]);
    if (panel.step < 0) return;
    if (panel.readable) consume<kDown>(args, ring, stages, at, panel);
    else store_zeros(args, panel);
    sync_warp();   // lanes may leave the stores apart; together again, the loop over K has its addresses in uniform registers
  }
}

}  // namespace hopper

KERNEL_ALONE(gate_up_large, MlpArgs, args, 384) {
  DYNAMIC_SHARED(memory);
  if (args.wave >= args.layer.plan->waves) return;
  fetch_first(args);
  hopper::run<false>(args, memory);
}

KERNEL_ALONE(down_large, MlpArgs, args, 384) {
  DYNAMIC_SHARED(memory);
  if (args.wave >= args.layer.plan->waves) return;
  hopper::run<true>(args, memory);
}
