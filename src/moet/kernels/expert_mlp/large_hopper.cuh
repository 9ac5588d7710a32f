// The two GEMMs for many tokens an expert (prefill), on Hopper: wgmma, with weights decoded into registers and activations in shared memory.
//
// A block stays: four warpgroups each take a strip of 64 rows and up to 128 pairs, and another one brings both operands, chunk of 64 columns after chunk, through a
// ring of stages, past the end of a panel into the next one. While a warpgroup decodes its strip's chunk, other warpgroups' products are under way.
//
// Activations lie arranged (columns.cuh): x since `arrange`, by token; act since gate_up_large stored it, a tile of pairs as wgmma reads it: chunk after chunk, of
// each chunk the pairs' rows of 128 bytes, swizzled. Scales are in the weights: exactly, but for FP8's float32 of a granule, with which a weight is rounded to bf16; its
// scale of a row multiplies the sum.
#pragma once
#include "../gpu/hopper.cuh"
#include "columns.cuh"
#include "pair_table.cuh"
#include "panels.cuh"

namespace hopper {
constexpr i32 kMostPairs = 128, kSums = kMostPairs / 2;   // sums of a thread
constexpr i32 kGroups = 4, kConsumerThreads = 128 * kGroups;
constexpr i32 kChunkBytes = 2 * kBlockBytes;             // of a strip
constexpr i32 kTileBytes = kMostPairs * 128;             // of a chunk's activations
// A stage: the tiles of its chunks, then weights as bulk copies bring them: gate_up's strips with all the stage's blocks, down's blocks with all the group's strips.
// From a block of down's to the next one it is 64 bytes past a multiple of 128: lanes that read both find other banks.
constexpr i32 kPerStage = kBits <= 8 ? 2 : 1, kBlockStride = kGroups * kBlockBytes + (kGroups * kBlockBytes % 128 ? 0 : 64);
constexpr i32 kWeightBytes = 2 * kPerStage * kBlockStride, kStageBytes = (kPerStage * kTileBytes + kWeightBytes + 1023) / 1024 * 1024;
constexpr i32 kRingBytes = (222 << 10) - kPairTableBytes;   // of 227 KiB; launches.py asks for 223, with the table and what aligns them
constexpr i32 kStages = kRingBytes / kStageBytes < 12 ? kRingBytes / kStageBytes : 12;
constexpr i32 kCopying = 128;   // threads
constexpr i32 kPanels = 3;
constexpr i32 kThreads = kConsumerThreads + kCopying, kRegisters = 112, kCopyingRegisters = 32;   // of a thread: 4 x 112 + 32 are 5 x 96

struct Ring {
  u64 full[kStages], empty[kStages];   // a stage's
  u64 told[kPanels], heard[kPanels];   // of `panel` and `row`
  Panel panel[kPanels];
  alignas(8) i32 row[kPanels][kMostPairs];        // of a panel's pairs: gate_up's in x, down's in y
  const u8* expert[kPanels];           // the row of a panel's weights, and its matrices' multipliers
  float factor[kPanels][3];
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

DEVICE void arrive_warp(u64* barrier) {   // all lanes, after all of them: tools that look for races see what each has written
  sync_warp();
  barrier_arrive(barrier);
}
DEVICE void release(Ring& ring, i32 stage) { barrier_arrive(&ring.empty[stage]); }   // all threads; products have been waited for

// Rows k = begin .. end - 1 of 16 each, of one chunk or of two.
template <i32 begin, i32 end, bool kTwo> DEVICE void copy_rows(SharedAt to, const u8* rows, const u32* from) {
  if constexpr (begin < end && begin < kMostPairs / 16) {
    const u8* row = unit_of(rows, from[begin]);
    copy_async16_by<2048 * begin, 0>(to, row);
    if constexpr (kTwo) copy_async16_by<kTileBytes + 2048 * begin, 128>(to, row);
    copy_rows<begin + 1, end, kTwo>(to, rows, from);
  }
}
template <bool kTwo> DEVICE void copy_tiles(SharedAt to, const u8* rows, const u32* from, i32 count) {
  copy_rows<0, 1, kTwo>(to, rows, from);
  if (count > 16) copy_rows<1, 2, kTwo>(to, rows, from);
  if (count > 32) copy_rows<2, 4, kTwo>(to, rows, from);
  if (count > 64) copy_rows<4, 6, kTwo>(to, rows, from);
  if (count > 96) copy_rows<6, 8, kTwo>(to, rows, from);
}

// The four copying warps. Activations of gate_up: lane l of warp w copies unit l % 8 of rows 4w + l / 8 and every 16th from there on. The rest is bulk copies, 145 clocks
// each up to 4 KiB, one after the other: one lane asks for strip w of gate_up, or block w of a stage's of down and chunk w of its activations. The first warp finds the panels.
template <bool kDown> DEVICE void produce(const MlpArgs& args, Ring& ring, u8* stages) {
  Plan& plan = *args.layer.plan;
  const i32 lane = thread_id() % 32, warp = uniform((thread_id() - kConsumerThreads) / 32), unit = lane % 8, row = 4 * warp + lane / 8;
  const i32 strips = strips_of<kDown>(args), chunks = chunks_of<kDown>(args);
  const u32 stride = static_cast<u32>(hidden_padded(args)) / 8;   // of x, in 16 bytes
  const SharedAt to = shared_at(stages) + row * 128 + (unit ^ (row & 7)) * 16;
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
        panel = panel_of(plan, walk, shuffle(drawn, 0), kMostPairs, args.many, strips, kGroups);
        if (panel.step < 0) break;
        if (lane == 0) {
          drawn = static_cast<i32>(draw_gpu(counter));
          panel.readable = !kDown && args.fetchers ? await_row(args.layer, panel.step, args.fetchers, waited) : !row_failed(plan, panel.step);
        }
        panel.readable = shuffle(panel.readable, 0);
        if (kDown || panel.readable) break;
      }
      barrier_wait(&ring.heard[slot], (number / kPanels & 1) ^ 1);
      for (i32 i = lane; i < panel.count; i += 32) {
        const i32 pair = plan.pairs[panel.position + i];
        ring.row[slot][i] = kDown ? pair : pair / args.layer.top_k;
      }
      if (panel.step >= 0 && panel.readable && lane < 3) {   // here, where nobody waits for memory
        ring.expert[slot] = row_of(args, plan.steps[panel.step]);
        ring.factor[slot][lane] = multiply(multiplier(args, row_of(args, plan.steps[panel.step]), lane), kUnit);
      }
      if (lane == 0) ring.panel[slot] = panel;
      arrive_warp(&ring.told[slot]);   // what lane 0 has seen, a row that other blocks have brought, included
    } else {
      barrier_wait(&ring.told[slot], number / kPanels & 1);
      panel = ring.panel[slot];
    }
    if (panel.step < 0) break;
    u32 from[kMostPairs / 16];
#pragma unroll
    for (i32 k = 0; k < kMostPairs / 16; ++k)
      if (!kDown) from[k] = static_cast<u32>(ring.row[slot][16 * k + row < panel.count ? 16 * k + row : panel.count - 1]) * stride + static_cast<u32>(unit);   // past the end: any row
    const u8* expert = ring.expert[slot];
    if (warp) arrive_warp(&ring.heard[slot]);
    if (!panel.readable) continue;
    const i32 count = uniform(panel.count), first = uniform(panel.strip), there = strips - first < kGroups ? strips - first : kGroups;
    const Strip strip = w2_strip(args, expert, first);
    const u8* weights = w13_strip(args, expert, first + (warp < there ? warp : 0)).at;
    const u32 tile = static_cast<u32>(128 * count);   // bytes of a chunk of down's activations
    const u8* rows = kDown ? reinterpret_cast<const u8*>(args.act + panel.position * args.act_stride) + warp * tile : args.x_large;
    if (!kDown && args.fetchers && !plan.steps[panel.step].hit) fence_async();   // other blocks have written the row, perhaps just now; waits for this thread's copies on their way
    next.stage = uniform(next.stage);
#pragma unroll 1
    for (i32 c = 0; c < chunks; c += kPerStage, advance(next)) {
      u8* stage = stages + next.stage * kStageBytes;
      u64* full = &ring.full[next.stage];
      const bool all = chunks - c >= kPerStage;
      const i32 here = all ? kPerStage : 1;
      barrier_wait(&ring.empty[next.stage], next.parity ^ 1);
      if (elected()) {
        const u32 x_bytes = kDown && warp < here ? tile : 0, bytes = static_cast<u32>(kDown ? (warp < 2 * here ? there * kBlockBytes : 0) : warp < there ? 2 * here * kBlockBytes : 0);
        u8* to_weights = stage + kPerStage * kTileBytes + warp * (kDown ? kBlockStride : kPerStage * kChunkBytes);
        barrier_expect(full, x_bytes + bytes);
        if (x_bytes) bulk_copy(stage + warp * kTileBytes, rows, x_bytes, full);
        if (bytes) bulk_copy(to_weights, kDown ? block_of(strip, 2 * c + warp) : weights, bytes, full);   // past down's end: any weights, against zeros
      }
      if constexpr (kDown) {
        rows += kPerStage * tile;
        sync_warp();   // or a lane that waits could be a turn of the ring late
      } else {
        if (all) copy_tiles<kPerStage == 2>(to + next.stage * kStageBytes, rows, from, count);
        else copy_tiles<false>(to + next.stage * kStageBytes, rows, from, count);
        rows += kPerStage * 128, weights += kPerStage * kChunkBytes;
        copies_arrive(full);
      }
    }
  }
  if (waited) maximum_gpu(&plan.stall[args.wave], waited);
}

// The rows of a strip that a thread has: of gate_up a gate row and the up row of the same value, of down two in a row.
template <bool kDown> DEVICE i32 row_of_thread(i32 which) {
  const i32 warp = thread_id() % 128 / 32, g = thread_id() % 32 / 4;
  return kDown ? 16 * warp + 2 * g + which : 32 * which + 8 * warp + g;
}

// What a thread decodes of a chunk: its two rows. Where they lie from the strip's chunk on: words, and scales.
struct Coded { Sixteen row[2]; };
struct Places { i32 word, scale; };
template <bool kDown> constexpr i32 kNextBlock = kDown ? kBlockStride : kBlockBytes;   // from a chunk's first to its second one
template <bool kDown> constexpr i32 kNextChunk = 2 * kNextBlock<kDown>;
template <bool kDown> DEVICE i32 weights_of_group() {   // in a stage
  return kPerStage * kTileBytes + uniform(thread_id() / 128) * (kDown ? kBlockBytes : kPerStage * kChunkBytes);
}
template <bool kDown> DEVICE Places places() {
  const i32 t = thread_id() % 4, row = row_of_thread<kDown>(0);
  return {(t >> 1) * kNextBlock<kDown> + (kWords * (t & 1) * 64 + row) * 4,
          (t >> 1) * kNextBlock<kDown> + kCodeBytes + (kFormat == kFp8 ? row / 32 * 4 : (kFormat == kNvfp4 ? (t & 1) * 64 : 0) + row)};
}
template <bool kDown, i32 i = 0> DEVICE void load_words_of(Coded& to, SharedAt at) {
  if constexpr (i < kWords) {
    if constexpr (kDown) {   // side by side
      load_two_words_by<256 * i>(at, to.row[0].word[i], to.row[1].word[i]);
    } else {
      to.row[0].word[i] = load_word_by<256 * i>(at);
      to.row[1].word[i] = load_word_by<256 * i + 4 * 32>(at);
    }
    load_words_of<kDown, i + 1>(to, at);
  }
}
template <bool kDown> DEVICE void load_coded(Coded& to, SharedAt chunk, const Places& place) {
  load_words_of<kDown>(to, chunk + place.word);
  if (kBits <= 4) to.row[0].scale = load_byte_by<0>(chunk + place.scale), to.row[1].scale = load_byte_by<kDown ? 1 : 32>(chunk + place.scale);
  if (kFormat == kFp8) to.row[0].scale = load_word_by<0>(chunk + place.scale), to.row[1].scale = kDown ? to.row[0].scale : load_word_by<4>(chunk + place.scale);
}
// What decoding needs, in registers outside the loop over K.
struct Decoder {
  SharedAt table;
  u32 lane;
  Constants constant;
};
DEVICE Decoder decoder(const Ring& ring, SharedAt stages) {
  const Decoder by = {stages - kPairTableBytes, static_cast<u32>(4 * (thread_id() % 32)), {}};
  return kPairTable ? by : Decoder{by.table, 0, ring.constant[thread_id() & 1]};
}
// The A fragments: a[4 s + i] is register i of product s.
DEVICE void decode_coded(const Coded& from, const Decoder& by, u32 (&a)[16]) {
#pragma unroll
  for (i32 i = 0; i < 2; ++i) {
    u32 pair[8];
    if constexpr (kPairTable) look_up_sixteen(from.row[i], by.table, by.lane, pair);
    else decode_sixteen(from.row[i], by.constant, pair);
#pragma unroll
    for (i32 r = 0; r < 8; ++r) a[4 * (r >> 1) + 2 * (r & 1) + i] = pair[r];
  }
}

// The stage is full: its address.
template <bool kDown> DEVICE SharedAt await_stage(Ring& ring, SharedAt stages, const Cursor& at) {
  barrier_wait(&ring.full[at.stage], at.parity);
  if (!kDown) fence_async_shared();   // what cp.async brought, to wgmma: here, since in the copying warps it waits for all that is on its way
  return stages + at.stage * kStageBytes;
}

// sum[4 j + 2 i + q]: the thread's row i, pair 8 j + 2 t + q.
template <bool kDown> DEVICE void multiply_panel(Ring& ring, SharedAt stages, Cursor& at, i32 chunks, i32 units, float (&sum)[kSums]) {
  const i32 weights = weights_of_group<kDown>();
  const Decoder by = decoder(ring, stages);
  const Places place = places<kDown>();
  u32 a[16] = {};
  i32 before = 0;
#pragma unroll
  for (i32 i = 0; i < kSums; ++i) sum[i] = 0.0f;
#pragma unroll 1
  for (i32 c = 0; c < chunks; advance(at)) {
    const SharedAt stage = await_stage<kDown>(ring, stages, at);
#pragma unroll
    for (i32 s = 0; s < kPerStage; ++s, ++c) {
      if (s && c >= chunks) break;
      Coded coded;
      if (kBits < 16) load_coded<kDown>(coded, stage + (weights + s * kNextChunk<kDown>), place);
      products_wait<0>();
      keep_registers(a, by.table);
      if (s == 0 && c) release(ring, before);
      if (kBits == 16) load_coded<kDown>(coded, stage + (weights + s * kNextChunk<kDown>), place);   // codes are the fragments: registers of the last product
      decode_coded(coded, by, a);
      multiply_tile<4>(sum, a, tile_descriptor(stage + s * kTileBytes), units, true);
    }
    before = at.stage;
  }
  products_wait<0>();
  keep_registers(a, by.table);
  settle(sum);
  release(ring, before);
}

// What stands before the sum of row i: FP8's scale of the row, and the matrix's own.
template <bool kDown> DEVICE float factor(const Ring& ring, i32 slot, const Strip& strip, i32 i) {
  const float whole = ring.factor[slot][kDown ? 2 : i];
  return kFormat == kFp8Row ? multiply(whole, load_float(strip.at + kCodeBytes + 4 * row_of_thread<kDown>(i))) : whole;
}

// Sixteen pairs' answers, number u. to: where the thread's two columns of y's first row are; rows: of the panel's pairs, from the thread's first one on.
template <i32 u> DEVICE void store_sixteen(const MlpArgs& args, u16* to, SharedAt rows, i32 left, const float (&factors)[2], const float (&bias)[2], const float (&sum)[kSums]) {
#pragma unroll
  for (i32 j = 2 * u; j < 2 * u + 2; ++j) {
    u32 row[2];
    if (j == 2 * u) load_two_words_by<64 * u>(rows, row[0], row[1]);
    else load_two_words_by<64 * u + 32>(rows, row[0], row[1]);
#pragma unroll
    for (i32 q = 0; q < 2; ++q)
      store_word_if(8 * j + q < left, to, row[q] * static_cast<u32>(args.hidden),
                    pack_bf16(fused_multiply_add(sum[4 * j + q], factors[0], bias[0]), fused_multiply_add(sum[4 * j + 2 + q], factors[1], bias[1])));
  }
}
template <i32 begin, i32 end> DEVICE void store_sixteens(const MlpArgs& args, u16* to, SharedAt rows, i32 left, const float (&factors)[2], const float (&bias)[2], const float (&sum)[kSums]) {
  if constexpr (begin < end && begin < kSums / 8) {
    store_sixteen<begin>(args, to, rows, left, factors, bias, sum);
    store_sixteens<begin + 1, end>(args, to, rows, left, factors, bias, sum);
  }
}
// The sums of a strip go where they belong.
DEVICE void store_down(const MlpArgs& args, const Ring& ring, i32 slot, i32 number, const float (&sum)[kSums]) {
  const i32 t = thread_id() % 4, column = 64 * number + row_of_thread<true>(0), count = ring.panel[slot].count;   // and the next column: hidden is even
  if (column >= args.hidden) return;
  const u8* expert = ring.expert[slot];
  const Strip strip = w2_strip(args, expert, number);
  const float factors[2] = {factor<true>(ring, slot, strip, 0), factor<true>(ring, slot, strip, 1)};
  const float bias[2] = {down_bias(args, expert, column), down_bias(args, expert, column + 1)};
  u16* const to = args.y + column;
  const SharedAt rows = shared_at(&ring.row[slot][2 * t]);
  const i32 left = count - 2 * t;
  store_sixteens<0, 1>(args, to, rows, left, factors, bias, sum);   // few branches: what lies between two of them is what waits for memory together
  if (count > 16) store_sixteens<1, 2>(args, to, rows, left, factors, bias, sum);
  if (count > 32) store_sixteens<2, 4>(args, to, rows, left, factors, bias, sum);
  if (count > 64) store_sixteens<4, 8>(args, to, rows, left, factors, bias, sum);
}
DEVICE void store_gate_up(const MlpArgs& args, const Ring& ring, i32 slot, i32 number, const float (&sum)[kSums]) {
  const i32 t = thread_id() % 4, value = row_of_thread<false>(0), column = 32 * number + value, count = ring.panel[slot].count;
  if (column >= args.act_stride) return;   // zeros up to there
  const bool there = number < args.tiles && 32 * args.tile_begin + column < args.inter, second = value & kApart;
  const Strip strip = w13_strip(args, ring.expert[slot], number < args.tiles ? number : 0);
  const float factors[2] = {factor<false>(ring, slot, strip, 0), factor<false>(ring, slot, strip, 1)};
  const float bias[2] = {tile_bias(args, strip, 0, value), tile_bias(args, strip, 1, value)};
  const i32 place = place_of(column % 64), row = 2 * t + second;   // of eight
  u16* to = args.act + ring.panel[slot].position * args.act_stride + (column / 64 * count + row) * 64 + (place / 8 ^ row) * 8 + place % 8;
#pragma unroll
  for (i32 j = 0; j < kSums / 4; ++j, to += 8 * 64) {
    if (8 * j >= count) return;
    float v[2];
#pragma unroll
    for (i32 q = 0; q < 2; ++q)
      v[q] = activate(args, fused_multiply_add(sum[4 * j + q], factors[0], bias[0]), fused_multiply_add(sum[4 * j + 2 + q], factors[1], bias[1]));
    // The pair's other value is another lane's: one of them stores both of pair 2t, the other one those of 2t + 1.
    const u32 mine = there ? pack_bf16(v[0], v[1]) : 0, other = shuffle_xor(mine, 4 * kApart);
    if (8 * j + row < count) *reinterpret_cast<u32*>(to) = second ? permute_bytes(other, mine, 0x7632) : permute_bytes(mine, other, 0x5410);
  }
}

// A warpgroup's strip of a panel.
template <bool kDown> DEVICE void consume(const MlpArgs& args, Ring& ring, SharedAt stages, Cursor& at, i32 slot) {
  const Panel panel = ring.panel[slot];
  float sum[kSums];
  const i32 units = uniform((panel.count + 15) / 16), number = panel.strip + thread_id() / 128;
  multiply_panel<kDown>(ring, stages, at, chunks_of<kDown>(args), units, sum);
  if constexpr (kDown) store_down(args, ring, slot, number, sum);
  else store_gate_up(args, ring, slot, number, sum);
}

// The answers of an expert whose row is lost.
DEVICE void store_zeros(const MlpArgs& args, const Panel& panel, const i32* rows) {
  const i32 column = 64 * panel.strip + 2 * (thread_id() % 128);   // 128 threads, 4 strips
  if (column >= args.hidden) return;
  for (i32 pair = thread_id() / 128; pair < panel.count; pair += kConsumerThreads / 128)
    *reinterpret_cast<u32*>(args.y + static_cast<i64>(rows[pair]) * args.hidden + column) = 0;
}

template <bool kDown> DEVICE void run(const MlpArgs& args, u8* memory) {
  SHARED(Ring, ring);
  u8* stages = align_shared(memory) + kPairTableBytes;
  make_pair_table(stages - kPairTableBytes);
  if (thread_id() == 0) {
    for (i32 i = 0; i < kStages; ++i) barrier_init(&ring.full[i], (kDown ? 0 : kCopying) + kCopying / 32), barrier_init(&ring.empty[i], kConsumerThreads);
    for (i32 i = 0; i < kPanels; ++i) barrier_init(&ring.told[i], 32), barrier_init(&ring.heard[i], kConsumerThreads + kCopying - 32);
    ring.constant[0] = ring.constant[1] = constants();
    barriers_ready();
  }
  sync_block();
  if (thread_id() >= kConsumerThreads) {
    fewer_registers<kCopyingRegisters>();
    return produce<kDown>(args, ring, stages);
  }
  more_registers<kRegisters>();
  Cursor at = {0, 0};
  const SharedAt stages_at = uniform_at(shared_at(stages));
  for (i32 number = 0;; ++number) {
    const i32 slot = number % kPanels;
    barrier_wait(&ring.told[slot], number / kPanels & 1);
    if (ring.panel[slot].step < 0) return;
    if (ring.panel[slot].readable) consume<kDown>(args, ring, stages_at, at, slot);
    else store_zeros(args, ring.panel[slot], ring.row[slot]);
    arrive_warp(&ring.heard[slot]);   // lanes may leave the stores apart; together again, the loop over K has its addresses in uniform registers
  }
}

}  // namespace hopper

KERNEL_ALONE(gate_up_large, MlpArgs, args, hopper::kThreads) {
  DYNAMIC_SHARED(memory);
  let_next_launch_begin();   // small.cuh, beside
  if (args.wave >= args.layer.plan->waves) return;
  fetch_first(args);
  hopper::run<false>(args, memory);
}

KERNEL_ALONE(down_large, MlpArgs, args, hopper::kThreads) {
  DYNAMIC_SHARED(memory);
  if (args.wave >= args.layer.plan->waves) return;
  hopper::run<true>(args, memory);
}
