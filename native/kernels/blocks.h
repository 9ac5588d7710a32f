// The kernels of one ISA: included inside its namespace and target, after its Vec.

// Rows are read once and from memory: a prefetch in time hides the latency, which the hardware's prefetcher does not across 4 KiB pages.
template <int format>
inline void prefetch_block(const uint8_t* ahead) {
  for (int line = 0; line < block_bytes(format); line += 64) __builtin_prefetch(ahead + line, 0, 3);
}

#include "float_blocks.h"
#include "int_blocks.h"

template <int format>
constexpr void fill(RunBlocks (&run)[kActsKinds]) {
  run[kFp32] = run_float<format>;
  if constexpr (has_integers(format)) {
    run[kInt8] = run_int<format, 1>;
    run[kInt16] = run_int<format, 2>;
    run[kInt24] = run_int<format, 3>;
  }
}

constexpr KernelTable make_table(const char* name) {
  KernelTable t{name, {}};
  fill<kSym2>(t.run[kSym2]);
  fill<kMxfp4>(t.run[kMxfp4]);
  fill<kNvfp4>(t.run[kNvfp4]);
  fill<kFp8>(t.run[kFp8]);
  fill<kFp8Row>(t.run[kFp8Row]);
  fill<kBf16>(t.run[kBf16]);
  fill<kTcq2>(t.run[kTcq2]);
  return t;
}
