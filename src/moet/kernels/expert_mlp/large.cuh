// The two GEMMs for many tokens an expert (prefill), gate_up_large and down_large: what the GPU is best at.
#pragma once
// What both include stands before them: in one text, a file is where it is included first.
#include "../gpu/copies.cuh"
#include "columns.cuh"
#include "epilogue.cuh"
#if MOET_ARCH == 90
#include "large_hopper.cuh"
#else
#include "large_mma.cuh"
#endif

// x, arranged, where gate_up_large looks for it; before the first wave. A thread for each 16 bytes.
KERNEL(arrange, MlpArgs, args, 256) {
  const i64 units = hidden_padded(args) / 8, index = static_cast<i64>(block_id()) * thread_count() + thread_id(), token = index / units;
  if (token < args.layer.tokens)
    arrange_unit(args.x + token * args.hidden, args.hidden, index % units, reinterpret_cast<u16*>(args.x_large) + token * hidden_padded(args));
}
