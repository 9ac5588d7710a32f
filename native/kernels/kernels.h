// The block kernels: a block (64 rows x 32 columns of one matrix, row.h) times a group of 32 activations of several tokens.
//
// Order of every sum, on every ISA and for every number of tokens: within a group k ascending, then acc = fma(group, scale, acc), groups
// ascending. Lanes are rows, so the vector width cannot change it.
#pragma once
#include <cstdint>

#include "../include/row.h"

namespace moet {

// Number format of the activations. kFp32: float32 products with fused multiply-add. kInt8/16/24: the group as integers of 1, 2 or 3 signed
// bytes times one scale, exact integer sums within the group (2- and 4-bit rows only).
enum Acts : int32_t { kFp32 = 0, kInt8 = 1, kInt16 = 2, kInt24 = 3 };
inline constexpr int kActsKinds = 4;

// Bytes of a group of 32 activations of one token. fp32: float[32]. Integers: int8 digits[acts][8][4] (least significant digit first, in
// the order in which a word's bytes meet them), float scale, int32 correction[2] (tcq2 at 3 bytes: int32 correction, float sum of q); kInt24 then has a byte at kLowDigit that is 0 if
// all its lowest digits are 0.
inline constexpr int kLowDigit = 32 * kInt24 + 12;
inline constexpr int group_bytes(int acts) { return acts == kFp32 ? 128 : 32 * acts + 16; }

// Integer weights of the integer formats are u = (value / unit + bias) / step >= 0, so that they fit the unsigned operand of the byte multiply.
inline constexpr int weight_bias(int format) { return format == kSym2 ? 4 : format == kTcq2 ? 15 : 12; }
inline constexpr int weight_step(int format) { return format == kTcq2 ? 2 : 1; }   // tcq2's levels are odd
inline constexpr float weight_unit(int format) { return format == kSym2 || format == kTcq2 ? 1.0f : 0.5f; }   // E2M1 values are halves

// What the kernel is run with: fp8 and bf16 rows have no integer path.
inline constexpr bool has_integers(int format) { return format_bits(format) <= 4; }
inline constexpr int acts_of(int format, int acts) { return has_integers(format) ? acts : int(kFp32); }

struct BlockRun {
  const uint8_t* blocks;     // consecutive blocks
  int32_t count;
  const uint8_t* acts;       // groups of `tokens` consecutive tokens, group_bytes apart
  int64_t acts_step;         // bytes from one block's groups to the next block's; 0: same columns
  int32_t tokens;
  float* acc;                // [tokens][64] within rows of acc_row floats; added to
  int64_t acc_row;
  int64_t acc_step;          // floats from one block's rows to the next block's; 0: same rows
  int64_t ahead;             // bytes from a block to what is to be prefetched meanwhile; readable or not
};
using RunBlocks = void (*)(const BlockRun&);

struct KernelTable {
  const char* name;
  RunBlocks run[kFormats][kActsKinds];   // [Format][Acts]; null where there is no integer path
};

const KernelTable& portable_kernels();
const KernelTable* avx2_kernels();      // null where the compiler or the machine has none
const KernelTable* avx512_kernels();
const KernelTable& kernels();           // the best of this machine, or what moet_set_isa chose

}  // namespace moet
