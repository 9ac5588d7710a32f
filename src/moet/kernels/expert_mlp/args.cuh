// What the launches of a layer's expert MLP get by value.
#pragma once
#include "../paging/state.cuh"

// Activations as the small kernels read them (activations.cuh), a row for each token or (token, place) pair.
struct Planes {
  u8* codes;               // [rows][blocks][64 bytes]: 32 columns
  i32* exponents;          // [rows][blocks]: << 23, to be added to the bits of a float32 scale
  u32* broken;             // [rows], 1: a value is not finite
};

struct MlpArgs {
  LayerArgs layer;
  const u16* x;            // bf16 [tokens, hidden]
  u16* act;                // bf16 [tokens * top_k, act_stride], by position in Plan.pairs
  u16* y;                  // bf16 [tokens * top_k, hidden], by pair
  const float* weights;    // [tokens, top_k]
  u16* out;                // bf16 [tokens, hidden]
  u8* x_large;             // [tokens][2 * hidden_padded] bytes: x as the large kernels read it, arranged (columns.cuh) or as MXFP8
  Planes x_planes;         // of x, by token; blocks: those of hidden_padded
  Planes act_planes;       // of act, by position; codes share act's memory
  i64 w13, w2, extras;     // where the row's segments start in a slot
  i64 act_stride;          // 32 * tiles, rounded up to 64
  i32 hidden, inter;       // the model's
  i32 tile_begin, tiles;   // this rank's part of the intermediate dimension, in tiles of 32
  i32 biased, adds_bias;   // the expert has biases; this rank adds down's
  i32 oai, limited;        // moet.models.Activation: kind swiglu_oai; limit is set
  float limit, alpha;
  i32 wave, fetchers;      // fetchers: blocks of the first GEMM that fetch first; 0 where rows come from elsewhere (scan.cuh)
  i32 combines;            // small.cuh: the last wave's launch combines, too
  i32 numbers;             // what the rows' format multiplies with, of activations.cuh's Numbers
  i32 many;                // steps with so many pairs are the large kernels', others small.cuh's
  i32 beside;              // small.cuh: its launch begins while that before it, gate_up_large, still runs
  i32 late;                // small.cuh: so many of its blocks begin later than the others, since `begin` has their multiprocessors
};
DEVICE i32 hidden_padded(const MlpArgs& a) { return (a.hidden + 63) / 64 * 64; }
