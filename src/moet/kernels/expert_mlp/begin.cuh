// What comes before a layer's GEMMs for few tokens, in one launch: block 0 plans the layer (paging/resolve.cuh), the others quantize x.
#pragma once
#include "../paging/resolve.cuh"
#include "activations.cuh"

KERNEL(begin, MlpArgs, args, kResolveThreads) {
  wait_for_launch_before();
  let_next_launch_begin();   // small.cuh makes its table meanwhile
  if (block_id() == 0) resolve_layer(args.layer);
  else quantize_tokens(args, block_id() - 1, block_count() - 1);
}

// The second half alone, where the plan comes from elsewhere.
KERNEL(quantize, MlpArgs, args, kResolveThreads) { quantize_tokens(args, block_id(), block_count()); }
