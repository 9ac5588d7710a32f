// What kernels may ask of a GPU, one name each. NVRTC compiles the PTX below; a host compiler takes the same names from emulator.h, where threads of
// a block are fibers of one CPU thread, so that the kernels' own source runs, and is tested, without a GPU. No header is included: NVRTC has none.
#pragma once

// The compute capability that a kernel may choose a path by, 90 for 9.0. Tests in the emulator say which one they want.
#ifndef MOET_ARCH
#ifdef __CUDA_ARCH__
#define MOET_ARCH (__CUDA_ARCH__ / 10)
#else
#define MOET_ARCH 90
#endif
#endif

#ifdef MOET_EMULATOR
#include "emulator.h"
#else
using u8 = unsigned char;
using u16 = unsigned short;
using i16 = short;
using i32 = int;
using u32 = unsigned int;
using i64 = long long;
using u64 = unsigned long long;

// KERNEL(name, Args, args, max_threads) { body }: a kernel with one parameter, a struct by value. Grids and blocks have one dimension.
#define KERNEL(name, Args, args, max_threads) extern "C" __global__ void __launch_bounds__(max_threads) name(const __grid_constant__ Args args)
#define DEVICE static __device__ __forceinline__
#define DEVICE_MEMBER __device__ __forceinline__
DEVICE i32 thread_id() { return threadIdx.x; }
DEVICE i32 thread_count() { return blockDim.x; }
DEVICE i32 block_id() { return blockIdx.x; }
DEVICE i32 block_count() { return gridDim.x; }
// SHARED(T, name): one T of the block, uninitialised. DYNAMIC_SHARED(name): the bytes asked for at launch, 16-byte aligned.
#define SHARED(T, name) __shared__ T name
#define DYNAMIC_SHARED(name) extern __shared__ __align__(16) u8 name[]

struct __align__(16) Vec4 { u32 x, y, z, w; };
struct __align__(8) Vec2 { u32 x, y; };
// 4 and 16 bytes of shared memory, by shared_address (copies.cuh); of load_shared_at the first part of it is known to the compiler, which spares an addition.
DEVICE u32 load_shared(u32 address) { u32 v; asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(address)); return v; }
DEVICE Vec4 load_shared16(u32 address) {
  Vec4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(address));
  return v;
}
template <u32 kAt> DEVICE u32 load_shared_at(u32 offset) { u32 v; asm("ld.shared.u32 %0, [%1 + %2];" : "=r"(v) : "r"(offset), "n"(kAt)); return v; }   // of what no longer changes

// --- memory order. `sys`: the CPU and devices too. Loads below never use the read-only cache.
DEVICE u32 load_acquire_gpu(const u32* p) { u32 v; asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory"); return v; }
DEVICE void store_release_gpu(u32* p, u32 v) { asm volatile("st.release.gpu.global.u32 [%0], %1;" :: "l"(p), "r"(v) : "memory"); }
DEVICE u32 load_acquire_sys(const u32* p) { u32 v; asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory"); return v; }
DEVICE u64 load_acquire_sys(const u64* p) { u64 v; asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory"); return v; }
DEVICE void store_release_sys(u32* p, u32 v) { asm volatile("st.release.sys.global.u32 [%0], %1;" :: "l"(p), "r"(v) : "memory"); }
DEVICE void store_release_sys(u64* p, u64 v) { asm volatile("st.release.sys.global.u64 [%0], %1;" :: "l"(p), "l"(v) : "memory"); }
// Without an order; fence_gpu() behind it makes it one that acquires. A loop that acquires each time would empty the L1 cache each time.
DEVICE u32 load_relaxed_gpu(const u32* p) { u32 v; asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory"); return v; }
// Releases; of whoever synchronised with this thread, too.
DEVICE void add_release_gpu(u32* p, u32 v) { asm volatile("red.release.gpu.global.add.u32 [%0], %1;" :: "l"(p), "r"(v) : "memory"); }
DEVICE u32 draw_release_gpu(u32* p) { u32 o; asm volatile("atom.release.gpu.global.add.u32 %0, [%1], 1;" : "=r"(o) : "l"(p) : "memory"); return o; }   // returns the value before
// Acquire and release at once; returns the value before.
DEVICE u32 atomic_add_gpu(u32* p, u32 v) { u32 o; asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;" : "=r"(o) : "l"(p), "r"(v) : "memory"); return o; }
// Returns the value before; orders nothing.
DEVICE u32 draw_gpu(u32* p) { u32 o; asm volatile("atom.relaxed.gpu.global.add.u32 %0, [%1], 1;" : "=r"(o) : "l"(p)); return o; }
DEVICE void count_gpu(u64* p, u64 v) { asm volatile("red.relaxed.gpu.global.add.u64 [%0], %1;" :: "l"(p), "l"(v) : "memory"); }
DEVICE void maximum_gpu(u64* p, u64 v) { asm volatile("red.relaxed.gpu.global.max.u64 [%0], %1;" :: "l"(p), "l"(v) : "memory"); }
DEVICE u32 atomic_add_shared(u32* p, u32 v) { return atomicAdd(p, v); }
DEVICE void fence_gpu() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }
DEVICE void fence_sys() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }
// 16 bytes that another processor may be writing: not torn inside a 4-byte word, never cached as read-only.
DEVICE Vec4 load_coherent(const void* p) {
  Vec4 v;
  asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
  return v;
}
// Loads at `base + offset`, where the base is all lanes' and the offset a lane's: one register of 32 bits for the address. 16 bytes that this block reads once, and words.
DEVICE Vec4 load_once(const u8* base, u32 offset) {
  Vec4 v;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(base + offset));
  return v;
}
DEVICE Vec4 load_vector(const u8* base, u32 offset) {
  Vec4 v;
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(base + offset));
  return v;
}
DEVICE u32 load_single(const u8* base, u32 offset) {
  u32 v;
  asm volatile("ld.global.u32 %0, [%1];" : "=r"(v) : "l"(base + offset));
  return v;
}
// p + by, made anew each time: a pointer that goes on with a loop takes two additions and, where ptxas parts its halves, two moves.
DEVICE const u8* further(const u8* p, u32 by) {
  u64 there;
  asm("{\n\t.reg .u64 by;\n\tcvt.u64.u32 by, %2;\n\tadd.u64 %0, %1, by;\n\t}" : "=l"(there) : "l"(p), "r"(by));
  return reinterpret_cast<const u8*>(there);
}
// The same without a branch, `by` bytes further: where not `there`, v stays what it is.
template <u32 by> DEVICE void load_vector_if(bool there, Vec4& v, const u8* p) {
  asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %5, 0;\n\t@p ld.global.v4.u32 {%0, %1, %2, %3}, [%4+%6];\n\t}"
               : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w) : "l"(p), "r"(static_cast<i32>(there)), "n"(by));
}
template <u32 by> DEVICE void load_double_if(bool there, u32& x, u32& y, const u8* p) {
  asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %3, 0;\n\t@p ld.global.v2.u32 {%0, %1}, [%2+%4];\n\t}" : "+r"(x), "+r"(y) : "l"(p), "r"(static_cast<i32>(there)), "n"(by));
}
template <u32 by> DEVICE void load_single_if(bool there, u32& x, const u8* p) {
  asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %2, 0;\n\t@p ld.global.u32 %0, [%1+%3];\n\t}" : "+r"(x) : "l"(p), "r"(static_cast<i32>(there)), "n"(by));
}
DEVICE void store16(void* p, Vec4 v) { *reinterpret_cast<Vec4*>(p) = v; }

// --- launches that begin early (Module.launch): until the launch before has ended and its memory is seen; lets the next one begin, once all blocks said so.
DEVICE void wait_for_launch_before() {
#if MOET_ARCH >= 90
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
DEVICE void let_next_launch_begin() {
#if MOET_ARCH >= 90
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// --- time
DEVICE u64 nanoseconds() { u64 t; asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t)); return t; }
DEVICE void pause(u32 ns) { asm volatile("nanosleep.u32 %0;" :: "r"(ns)); }

// --- warp and block
DEVICE void sync_block() { __syncthreads(); }
DEVICE void sync_warp() { __syncwarp(); }
DEVICE u32 ballot(bool b) { return __ballot_sync(0xffffffffu, b); }
template <typename T> DEVICE T shuffle(T v, i32 lane) { return __shfl_sync(0xffffffffu, v, lane); }
template <typename T> DEVICE T shuffle_xor(T v, i32 mask) { return __shfl_xor_sync(0xffffffffu, v, mask); }
template <typename T> DEVICE T shuffle_up(T v, i32 by) { return __shfl_up_sync(0xffffffffu, v, by); }
// What all lanes of a warp hold alike, so that the compiler knows: branches and addresses then go to the uniform registers.
DEVICE i32 uniform(i32 v) { return __shfl_sync(0xffffffffu, v, 0); }
// The same value: what follows from it is computed behind this, not kept from further up. (ptxas sees through it.)
template <typename T> DEVICE T unknown(T v) { asm volatile("mov.b32 %0, %1;" : "=r"(v) : "r"(v)); return v; }
DEVICE i32 popcount(u32 v) { return __popc(v); }
DEVICE i32 lowest_bit(u32 v) { return __ffs(v) - 1; }

// --- bits and numbers
DEVICE u32 permute_bytes(u32 a, u32 b, u32 selector) { u32 v; asm("prmt.b32 %0, %1, %2, %3;" : "=r"(v) : "r"(a), "r"(b), "r"(selector)); return v; }
DEVICE u32 multiply_add(u32 a, u32 b, u32 c) { u32 v; asm("mad.lo.u32 %0, %1, %2, %3;" : "=r"(v) : "r"(a), "r"(b), "r"(c)); return v; }   // stays one instruction
// 0, of which the compiler does not know that: blocks have one dimension. A constant plus it stays in a register, where ptxas would write it anew for each use.
DEVICE u32 unknown_zero() { return threadIdx.y; }
// What logic and shifts do, by dot products and multipliers. On Hopper logic takes an instruction in two clocks, like multipliers, and codes ask for twice as much of it. Not
// by the upper half of a product: IMAD.HI takes the scheduler several clocks (mxfp4 with 16 tokens: 164 us where this takes 154).
DEVICE u32 upper_half(u32 v) { u32 h; asm("dp2a.lo.u32.u32 %0, %1, %2, %3;" : "=r"(h) : "r"(v), "r"(0x100u + unknown_zero()), "r"(0)); return h; }
DEVICE u32 complement(u32 v) { return multiply_add(v, unknown_zero() - 1, unknown_zero() - 1); }
DEVICE float to_float(i32 v) { return __int2float_rn(v); }
DEVICE float as_float(u32 v) { return __uint_as_float(v); }
DEVICE u32 as_bits(float v) { return __float_as_uint(v); }
// Two bf16 in a word, `low` in the low half; rounded to nearest even.
DEVICE u32 pack_bf16(float low, float high) { u32 v; asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(v) : "f"(high), "f"(low)); return v; }
DEVICE u32 pack_half(float low, float high) { u32 v; asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(v) : "f"(high), "f"(low)); return v; }   // likewise, float16
// Products of two bf16 pairs, rounded to nearest even (an fma with -0, so that a zero keeps its sign).
DEVICE u32 multiply_bf16x2(u32 a, u32 b) { u32 v; asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(v) : "r"(a), "r"(b), "r"(0x80008000u)); return v; }
// a * b + c of two bf16 pairs, rounded once, to nearest even; numbers below the normal range too.
DEVICE u32 multiply_add_bf16x2(u32 a, u32 b, u32 c) { u32 v; asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(v) : "r"(a), "r"(b), "r"(c)); return v; }
// The larger one of each half, unsigned.
DEVICE u32 maximum_u16x2(u32 a, u32 b) { return __vmaxu2(a, b); }
DEVICE i32 round_to_int(float v) { return __float2int_rn(v); }   // to even; saturates
DEVICE float fused_multiply_add(float a, float b, float c) { return __fmaf_rn(a, b, c); }
DEVICE float multiply(float a, float b) { return __fmul_rn(a, b); }   // never contracted into an fma
DEVICE float add(float a, float b) { return __fadd_rn(a, b); }
// Good to 2^-20 for what a sigmoid does not round away: 4 instructions for both of them, where expf and a rounded division take 40. That was 7 % of a large GEMM.
DEVICE float exponential(float v) { float e; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(v * 1.44269504f)); return e; }
DEVICE float divide(float a, float b) { float r; asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(b)); return a * r; }   // 1 <= b

// D = A x B + D. A: bf16 16 x 16, row-major fragments; B: bf16 16 x 8; D: float32 16 x 8 (PTX ISA, "mma.m16n8k16").
DEVICE void mma_bf16(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
DEVICE void mma_f16(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {   // likewise, float16
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
// D = A x B + C. A: int8 16 x 32, B: int8 32 x 8, C and D: int32 16 x 8 (PTX ISA, "mma.m16n8k32").
struct Fragment { u32 of[4]; };
struct Columns8 { u32 of[2]; };
DEVICE void mma_s8(i32 (&d)[4], const Fragment& a, const Columns8& b, const i32 (&c)[4]) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%11,%12,%13};"
               : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
               : "r"(a.of[0]), "r"(a.of[1]), "r"(a.of[2]), "r"(a.of[3]), "r"(b.of[0]), "r"(b.of[1]), "r"(c[0]), "r"(c[1]), "r"(c[2]), "r"(c[3]));
}
#endif
