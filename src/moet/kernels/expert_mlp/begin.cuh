// What comes before a layer's GEMMs for few tokens, in one launch: block 0 plans the layer (paging/resolve.cuh), each other block quantizes one token's x.
#pragma once
#include "../paging/resolve.cuh"
#include "activations.cuh"

KERNEL(begin, MlpArgs, args, kResolveThreads) {
  let_next_launch_begin();   // small.cuh makes its table meanwhile
  wait_for_launch_before();
  if (block_id() == 0) resolve_layer(args.layer);
  else quantize_token(args, block_id() - 1);
}

// The second half alone, where the plan comes from elsewhere; a block for each token.
KERNEL(quantize, MlpArgs, args, kResolveThreads) { quantize_token(args, block_id()); }
