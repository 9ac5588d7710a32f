// What sm_90a adds: barriers in shared memory that copies arrive at, and products of a warpgroup (wgmma).
#pragma once
#include "copies.cuh"

#ifndef MOET_EMULATOR
// KERNEL, one block of it a multiprocessor: more_registers needs to know.
#define KERNEL_ALONE(name, Args, args, max_threads) extern "C" __global__ void __launch_bounds__(max_threads, 1) name(const __grid_constant__ Args args)

// --- a barrier in shared memory: a phase ends when `count` arrivals have come and so have the bytes that were announced. Phases have parities 0, 1, 0, ...
DEVICE void barrier_init(u64* b, u32 count) { asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(shared_address(b)), "r"(count) : "memory"); }
// One thread, after the last barrier_init and before the block meets: other units see them.
DEVICE void barriers_ready() { asm volatile("fence.mbarrier_init.release.cluster;\n\tfence.proxy.async;" ::: "memory"); }
DEVICE void barrier_arrive(u64* b) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(shared_address(b)) : "memory"); }
DEVICE void barrier_expect(u64* b, u32 bytes) {   // arrives, too
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(shared_address(b)), "r"(bytes) : "memory");
}
// Whether the phase of that parity is over.
DEVICE bool barrier_test(u64* b, u32 parity) {
  u32 v;
  asm volatile("{\n\t.reg .pred p;\n\tmbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\n\tselp.u32 %0, 1, 0, p;\n\t}" : "=r"(v) : "r"(shared_address(b)), "r"(parity) : "memory");
  return v;
}
// Until it is.
DEVICE void barrier_wait(u64* b, u32 parity) {
#if MOET_ARCH >= 90
  asm volatile("{\n\t.reg .pred p;\n\tagain:\n\tmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1, %2;\n\t@p bra done;\n\tbra again;\n\tdone:\n\t}"
               :: "r"(shared_address(b)), "r"(parity), "r"(1000000) : "memory");   // asleep for a millisecond at most
#else
  while (!barrier_test(b, parity)) pause(20);
#endif
}
// One lane of a warp that all are here with: what it does then takes uniform registers, as copies do.
DEVICE bool elected() {
  u32 v;
  asm volatile("{\n\t.reg .pred p;\n\telect.sync _|p, 0xffffffff;\n\tselp.u32 %0, 1, 0, p;\n\t}" : "=r"(v));
  return v;
}
// Whole 16-byte words, aligned; the bytes count at `b` when they are there.
DEVICE void bulk_copy(void* to, const void* from, u32 bytes, u64* b) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
               :: "r"(shared_address(to)), "l"(from), "r"(bytes), "r"(shared_address(b)) : "memory");
}
// Arrives when this thread's copies up to here have landed.
DEVICE void copies_arrive(u64* b) { asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" :: "r"(shared_address(b)) : "memory"); }
// An address in shared memory, as wide as instructions take it. A copy of 16 bytes, and loads, at fixed distances from one.
using SharedAt = u32;
DEVICE SharedAt shared_at(const void* p) { return shared_address(p); }
DEVICE SharedAt uniform_at(SharedAt at) { return __shfl_sync(0xffffffffu, at, 0); }   // as uniform(); also, it is not computed again
template <i32 to_by, i32 from_by> DEVICE void copy_async16_by(SharedAt to, const u8* from) {
  asm volatile("cp.async.cg.shared.global [%0+%2], [%1+%3], 16;" :: "r"(to), "l"(from), "n"(to_by), "n"(from_by) : "memory");
}
template <i32 by> DEVICE u32 load_word_by(SharedAt at) { u32 v; asm volatile("ld.shared.u32 %0, [%1+%2];" : "=r"(v) : "r"(at), "n"(by) : "memory"); return v; }
template <i32 by> DEVICE void load_two_words_by(SharedAt at, u32& a, u32& b) { asm volatile("ld.shared.v2.u32 {%0, %1}, [%2+%3];" : "=r"(a), "=r"(b) : "r"(at), "n"(by) : "memory"); }
template <i32 by> DEVICE u32 load_byte_by(SharedAt at) { u32 v; asm volatile("ld.shared.u8 %0, [%1+%2];" : "=r"(v) : "r"(at), "n"(by) : "memory"); return v; }
// Loads from a table at a place in it.
DEVICE u32 load_word_at(SharedAt table, u32 place) { u32 v; asm("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(table + place)); return v; }
// The 16 bytes number `index`.
DEVICE const u8* unit_of(const u8* base, u32 index) {
  u64 p;
  asm("mad.wide.u32 %0, %1, 16, %2;" : "=l"(p) : "r"(index), "l"(base));
  return reinterpret_cast<const u8*>(p);
}
// A word goes to base + 2 * index, without a branch.
DEVICE void store_word_if(bool there, u16* base, u32 index, u32 word) {
  asm volatile("{\n\t.reg .pred p;\n\t.reg .u64 at;\n\tsetp.ne.b32 p, %3, 0;\n\tmad.wide.u32 at, %1, 2, %0;\n\t@p st.global.u32 [at], %2;\n\t}"
               :: "l"(base), "r"(index), "r"(word), "r"(static_cast<i32>(there)) : "memory");
}
DEVICE void fence_async() { asm volatile("fence.proxy.async;" ::: "memory"); }   // what this thread knows of memory comes before bulk copies
// This thread's stores and copies to shared memory come before what wgmma reads.
DEVICE void fence_async_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// All warps of a warpgroup: from what it was compiled for to n registers a thread, a multiple of 8; more of them wait until others have let go.
template <i32 n> DEVICE void fewer_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" :: "n"(n)); }
template <i32 n> DEVICE void more_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" :: "n"(n)); }
DEVICE u8* align_shared(u8* p) { return p + (-shared_address(p) & 1023u); }   // to a multiple of 1024

// --- wgmma: D = A x B + D (or A x B). Four warps, 64 rows, warp w of them has rows 16w .. 16w+15; A: bf16 64 x 16 in registers, as mma_bf16's fragments; B: bf16
// 16 x n in shared memory; D: float32 64 x n, d[4j + q] as mma_bf16's d[q] for columns 8j .. 8j+7. Registers belong to the product until it is waited for.
//
// B is a tile of n rows of 128 bytes, 64 columns of K each, at a multiple of 1024 bytes: 16-byte unit u of row r lies at unit u ^ (r & 7) (128-byte swizzle).
// Sixteen columns on are 32 bytes on.
using TileDescriptor = u32;   // the lower half of what the PTX ISA calls a matrix descriptor; the upper one is the same for all, and additions carry nothing into it
constexpr u32 kDescriptorStep = 32 >> 4;
DEVICE TileDescriptor tile_descriptor(SharedAt tile) { return 1u << 16 | (tile & 0x3ffffu) >> 4; }
DEVICE TileDescriptor tile_descriptor(const void* tile) { return tile_descriptor(shared_address(tile)); }

#define MOET_D(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define MOET_WGMMA(n, list, a0, a1, a2, a3, b, keep, ...)                                                                                             \
  asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %" #keep ", 0;\n\twgmma.mma_async.sync.aligned.m64n" #n "k16.f32.bf16.bf16 {" list "}, {%" #a0 ", %" #a1 \
               ", %" #a2 ", %" #a3 "}, %" #b ", p, 1, 1, 0;\n\t}" : __VA_ARGS__ : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"((1ull << 62 | 64ull << 32) | tile), "r"(static_cast<i32>(adds)))
#define MOET_L16 "%0,%1,%2,%3,%4,%5,%6,%7"
#define MOET_L32 MOET_L16 ",%8,%9,%10,%11,%12,%13,%14,%15"
#define MOET_L48 MOET_L32 ",%16,%17,%18,%19,%20,%21,%22,%23"
#define MOET_L64 MOET_L48 ",%24,%25,%26,%27,%28,%29,%30,%31"
#define MOET_L80 MOET_L64 ",%32,%33,%34,%35,%36,%37,%38,%39"
#define MOET_L96 MOET_L80 ",%40,%41,%42,%43,%44,%45,%46,%47"
#define MOET_L112 MOET_L96 ",%48,%49,%50,%51,%52,%53,%54,%55"
#define MOET_L128 MOET_L112 ",%56,%57,%58,%59,%60,%61,%62,%63"
// One wgmma; n: a multiple of 16.
template <i32 n, i32 size> DEVICE void wgmma(float (&d)[size], const u32* a, TileDescriptor tile, bool adds) {
  static_assert(n / 2 <= size && n % 16 == 0 && n >= 16 && n <= 128);
  if constexpr (n == 16) MOET_WGMMA(16, MOET_L16, 8, 9, 10, 11, 12, 13, MOET_D(0));
  if constexpr (n == 32) MOET_WGMMA(32, MOET_L32, 16, 17, 18, 19, 20, 21, MOET_D(0), MOET_D(8));
  if constexpr (n == 48) MOET_WGMMA(48, MOET_L48, 24, 25, 26, 27, 28, 29, MOET_D(0), MOET_D(8), MOET_D(16));
  if constexpr (n == 64) MOET_WGMMA(64, MOET_L64, 32, 33, 34, 35, 36, 37, MOET_D(0), MOET_D(8), MOET_D(16), MOET_D(24));
  if constexpr (n == 80) MOET_WGMMA(80, MOET_L80, 40, 41, 42, 43, 44, 45, MOET_D(0), MOET_D(8), MOET_D(16), MOET_D(24), MOET_D(32));
  if constexpr (n == 96) MOET_WGMMA(96, MOET_L96, 48, 49, 50, 51, 52, 53, MOET_D(0), MOET_D(8), MOET_D(16), MOET_D(24), MOET_D(32), MOET_D(40));
  if constexpr (n == 112)
    MOET_WGMMA(112, MOET_L112, 56, 57, 58, 59, 60, 61, MOET_D(0), MOET_D(8), MOET_D(16), MOET_D(24), MOET_D(32), MOET_D(40), MOET_D(48));
  if constexpr (n == 128)
    MOET_WGMMA(128, MOET_L128, 64, 65, 66, 67, 68, 69, MOET_D(0), MOET_D(8), MOET_D(16), MOET_D(24), MOET_D(32), MOET_D(40), MOET_D(48), MOET_D(56));
}
template <i32 n, i32 steps, i32 size> DEVICE void wgmma_steps(float (&d)[size], const u32* a, TileDescriptor tile, bool adds) {
  if constexpr (n / 2 <= size) {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");   // registers written before, products after
#pragma unroll
    for (i32 s = 0; s < steps; ++s) wgmma<n>(d, a + 4 * s, tile + s * kDescriptorStep, s || adds);
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");   // in each branch: behind them, ptxas makes a group of nothing
  }
}
// A group of products: 16 * steps of K, 16 * units columns of a tile (at most 2 * size). a: 4 registers a step. adds: to d. All threads say the same. One loop over K
// with these eight in it takes a third of the code of eight loops, and ptxas finds registers for it; it takes turns between the products of eight loops ("C7512").
// Comparisons, not a switch: a jump through a table takes a hundred clocks, in every turn. One unit and the widest tiles are found first.
template <i32 steps, i32 size> DEVICE void multiply_tile(float (&d)[size], const u32* a, TileDescriptor tile, i32 units, bool adds) {
  if (units == 1) {
    wgmma_steps<16, steps>(d, a, tile, adds);
  } else if (units >= 7) {
    if (units == 8) wgmma_steps<128, steps>(d, a, tile, adds);
    else wgmma_steps<112, steps>(d, a, tile, adds);
  } else if (units <= 3) {
    if (units == 2) wgmma_steps<32, steps>(d, a, tile, adds);
    else wgmma_steps<48, steps>(d, a, tile, adds);
  } else if (units == 4) {
    wgmma_steps<64, steps>(d, a, tile, adds);
  } else {
    if (units == 5) wgmma_steps<80, steps>(d, a, tile, adds);
    else wgmma_steps<96, steps>(d, a, tile, adds);
  }
}
template <i32 n> DEVICE void products_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(n) : "memory"); }   // until at most n groups are under way
// Behind the wait for products: their 16 A registers were theirs up to here. ptxas does not know that products still read what was handed to them, and gives the
// registers to the next values; stores that never happen make it keep them. `never` is not 0, but that is for memory to know. Twelve stores are jumped over, four
// would be predicated and take their turns in every loop.
#define MOET_STORE_A(at)                                                                                                             \
  "st.shared.v4.u32 [%16+" #at "], {%0, %1, %2, %3};\n\tst.shared.v4.u32 [%16+" #at "+16], {%4, %5, %6, %7};\n\t"                    \
  "st.shared.v4.u32 [%16+" #at "+32], {%8, %9, %10, %11};\n\tst.shared.v4.u32 [%16+" #at "+48], {%12, %13, %14, %15};\n\t"
DEVICE void keep_registers(const u32 (&a)[16], SharedAt never) {
  asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.u32 p, %16, 0;\n\t@p bra.uni kept;\n\t" MOET_STORE_A(0) MOET_STORE_A(64) MOET_STORE_A(128) "kept:\n\t}"
               :: "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(a[4]), "r"(a[5]), "r"(a[6]), "r"(a[7]), "r"(a[8]), "r"(a[9]), "r"(a[10]), "r"(a[11]),
                  "r"(a[12]), "r"(a[13]), "r"(a[14]), "r"(a[15]), "r"(never) : "memory");
}
// After the last of them: sums are read behind it, not before.
template <i32 size> DEVICE void settle(float (&d)[size]) {
#pragma unroll
  for (i32 i = 0; i < size; ++i) asm volatile("" : "+f"(d[i]) :: "memory");
}
#endif
