// Every name of kernels/gpu/gpu.cuh for a host compiler: kernels run from their own source, one fiber per CUDA thread (machine.h). Memory is host memory,
// and loads and stores that name an order are real atomics, so that I/O threads of the process may be on the other side. What it cannot show: memory is
// seen in program order here, so a missing fence or release goes unnoticed, and a missing sync_block only if the scheduler happens on the right order.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

#include "machine.h"

using u8 = unsigned char;
using u16 = unsigned short;
using i16 = short;
using i32 = int;
using u32 = unsigned int;
using i64 = long long;
using u64 = unsigned long long;

// Defines `int name(const void* args, int blocks, int threads, int shared_bytes, uint64_t seed)`: 0, or 1 with emulator_error(). Seed 0 takes turns.
#define KERNEL(name, Args, args, max_threads)                                                                                          \
  static void name##_body(const Args& args);                                                                                           \
  extern "C" int name(const void* args, int blocks, int threads, int shared_bytes, uint64_t seed) {                                    \
    Args copy;                                                                                                                         \
    std::memcpy(static_cast<void*>(&copy), args, sizeof copy);                                                                         \
    return emulator::machine.launch([](const void* a) { name##_body(*static_cast<const Args*>(a)); }, &copy, blocks, threads, max_threads, \
                                    shared_bytes, seed);                                                                               \
  }                                                                                                                                    \
  static void name##_body(const Args& args)
#define DEVICE [[maybe_unused]] static inline
#define DEVICE_MEMBER inline
#define SHARED(T, name)                    \
  static const char name##_shared_key = 0; \
  T& name = *static_cast<T*>(emulator::machine.shared(&name##_shared_key, sizeof(T), alignof(T)))
#define DYNAMIC_SHARED(name) u8* const name = emulator::machine.dynamic()

DEVICE i32 thread_id() { return emulator::machine.current->thread; }
DEVICE i32 thread_count() { return emulator::machine.threads; }
DEVICE i32 block_id() { return emulator::machine.current->warp->block->id; }
DEVICE i32 block_count() { return emulator::machine.blocks; }

struct __attribute__((may_alias, aligned(16))) Vec4 { u32 x, y, z, w; };
struct __attribute__((may_alias, aligned(8))) Vec2 { u32 x, y; };

template <typename T> DEVICE T emulated_load(const u8* p) {
  T v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
constexpr u32 kEmulatedDynamic = 1088;   // where the dynamic shared memory begins: what the system keeps, and variables
DEVICE u32 shared_address(const void* p) { return kEmulatedDynamic + static_cast<u32>(static_cast<const u8*>(p) - emulator::machine.dynamic()); }
DEVICE u32 load_shared(u32 address) { return emulated_load<u32>(emulator::machine.dynamic() + (address - kEmulatedDynamic)); }
DEVICE Vec4 load_shared16(u32 address) { return emulated_load<Vec4>(emulator::machine.dynamic() + (address - kEmulatedDynamic)); }
template <u32 kAt> DEVICE u32 load_shared_at(u32 offset) { return load_shared(kAt + offset); }

// --- memory order
template <typename T> DEVICE T emulated_acquire(const T* p) {
  emulator::machine.yield();   // a loop that waits for this value must let others run
  return __atomic_load_n(p, __ATOMIC_ACQUIRE);
}
template <typename T> DEVICE void emulated_release(T* p, T v) {
  emulator::machine.perhaps_yield();
  __atomic_store_n(p, v, __ATOMIC_RELEASE);
  emulator::machine.perhaps_yield();
}
DEVICE u32 load_acquire_gpu(const u32* p) { return emulated_acquire(p); }
DEVICE void store_release_gpu(u32* p, u32 v) { emulated_release(p, v); }
DEVICE u32 load_acquire_sys(const u32* p) { return emulated_acquire(p); }
DEVICE u64 load_acquire_sys(const u64* p) { return emulated_acquire(p); }
DEVICE void store_release_sys(u32* p, u32 v) { emulated_release(p, v); }
DEVICE void store_release_sys(u64* p, u64 v) { emulated_release(p, v); }
DEVICE u32 load_relaxed_gpu(const u32* p) { return emulated_acquire(p); }
DEVICE u32 atomic_add_gpu(u32* p, u32 v) {
  emulator::machine.perhaps_yield();
  const u32 before = __atomic_fetch_add(p, v, __ATOMIC_ACQ_REL);
  emulator::machine.perhaps_yield();
  return before;
}
DEVICE void add_release_gpu(u32* p, u32 v) { atomic_add_gpu(p, v); }
DEVICE u32 draw_release_gpu(u32* p) { return atomic_add_gpu(p, 1); }
DEVICE u32 draw_gpu(u32* p) { return atomic_add_gpu(p, 1); }
DEVICE void count_gpu(u64* p, u64 v) { __atomic_fetch_add(p, v, __ATOMIC_RELAXED); }
DEVICE void maximum_gpu(u64* p, u64 v) { *p = *p < v ? v : *p; }
DEVICE u32 atomic_add_shared(u32* p, u32 v) {
  emulator::machine.perhaps_yield();
  const u32 before = *p;
  *p += v;
  return before;
}
DEVICE void fence_gpu() { __atomic_thread_fence(__ATOMIC_SEQ_CST), emulator::machine.perhaps_yield(); }
DEVICE void fence_sys() { fence_gpu(); }
DEVICE Vec4 load_coherent(const void* p) {
  emulator::machine.perhaps_yield();
  const u32* word = static_cast<const u32*>(p);
  return {__atomic_load_n(word, __ATOMIC_RELAXED), __atomic_load_n(word + 1, __ATOMIC_RELAXED), __atomic_load_n(word + 2, __ATOMIC_RELAXED),
          __atomic_load_n(word + 3, __ATOMIC_RELAXED)};
}
DEVICE Vec4 load_once(const u8* base, u32 offset) { return emulated_load<Vec4>(base + offset); }
DEVICE Vec4 load_vector(const u8* base, u32 offset) { return emulated_load<Vec4>(base + offset); }
DEVICE u32 load_single(const u8* base, u32 offset) { return emulated_load<u32>(base + offset); }
DEVICE const u8* further(const u8* p, u32 by) { return p + by; }
template <u32 by> DEVICE void load_vector_if(bool there, Vec4& v, const u8* p) {
  if (there) v = emulated_load<Vec4>(p + by);
}
template <u32 by> DEVICE void load_double_if(bool there, u32& x, u32& y, const u8* p) {
  if (there) x = emulated_load<u32>(p + by), y = emulated_load<u32>(p + by + 4);
}
template <u32 by> DEVICE void load_single_if(bool there, u32& x, const u8* p) {
  if (there) x = emulated_load<u32>(p + by);
}
DEVICE void store16(void* p, Vec4 v) { *static_cast<Vec4*>(p) = v; }

// --- launches follow each other
DEVICE void wait_for_launch_before() {}
DEVICE void let_next_launch_begin() {}

// --- time
DEVICE u64 nanoseconds() { return emulator::clock_ns(); }
DEVICE void pause(u32) { emulator::machine.yield(); }

// --- warp and block
DEVICE void sync_block() { emulator::machine.block_barrier(); }
DEVICE void sync_warp() {
  emulator::machine.meet(emulator::Meeting::kSync, [](auto&, u32, i32) {}, [](auto&, u32) {});
}
DEVICE u32 ballot(bool b) {
  emulator::Warp& w = *emulator::machine.current->warp;
  const u32 place = emulator::machine.meet(
      emulator::Meeting::kBallot, [b](auto& warp, u32 at, i32 lane) { warp.value[at][lane] = b; },
      [](auto& warp, u32 at) {
        u32 votes = 0;
        for (i32 lane = 0; lane < 32; ++lane) votes |= static_cast<u32>(warp.value[at][lane]) << lane;
        warp.votes[at] = votes;
      });
  return w.votes[place];
}
template <typename T> DEVICE T emulated_shuffle(T v, i32 source) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8, "the hardware shuffles words");
  emulator::Warp& w = *emulator::machine.current->warp;
  const u32 place = emulator::machine.meet(
      emulator::Meeting::kShuffle, [&v](auto& warp, u32 at, i32 lane) { std::memcpy(&warp.value[at][lane], &v, sizeof v); }, [](auto&, u32) {});
  T taken;
  std::memcpy(&taken, &w.value[place][source], sizeof taken);
  return taken;
}
template <typename T> DEVICE T shuffle(T v, i32 lane) { return emulated_shuffle(v, lane & 31); }
template <typename T> DEVICE T shuffle_xor(T v, i32 mask) { return emulated_shuffle(v, (thread_id() ^ mask) & 31); }
template <typename T> DEVICE T shuffle_up(T v, i32 by) {
  const i32 lane = thread_id() & 31;
  return emulated_shuffle(v, lane >= by ? lane - by : lane);
}
DEVICE i32 uniform(i32 v) { return v; }
template <typename T> DEVICE T unknown(T v) { return v; }
DEVICE i32 popcount(u32 v) { return __builtin_popcount(v); }
DEVICE i32 lowest_bit(u32 v) { return __builtin_ffs(static_cast<int>(v)) - 1; }

// --- bits and numbers
DEVICE u32 permute_bytes(u32 a, u32 b, u32 selector) {
  const u64 bytes = static_cast<u64>(b) << 32 | a;
  u32 v = 0;
  for (i32 i = 0; i < 4; ++i) {
    const u32 pick = selector >> (4 * i) & 15;
    u32 byte = static_cast<u32>(bytes >> (8 * (pick & 7))) & 255;
    if (pick & 8) byte = byte & 128 ? 255 : 0;   // the sign, eight times
    v |= byte << (8 * i);
  }
  return v;
}
DEVICE u32 multiply_add(u32 a, u32 b, u32 c) { return a * b + c; }
DEVICE u32 unknown_zero() { return 0; }
DEVICE u32 upper_half(u32 v) { return v >> 16; }
DEVICE u32 complement(u32 v) { return ~v; }
DEVICE float to_float(i32 v) { return static_cast<float>(v); }
DEVICE float as_float(u32 v) {
  float f;
  std::memcpy(&f, &v, sizeof f);
  return f;
}
DEVICE u32 as_bits(float v) {
  u32 bits;
  std::memcpy(&bits, &v, sizeof bits);
  return bits;
}
DEVICE u32 emulated_bf16(float v) {
  if (std::isnan(v)) return 0x7fff;
  const u32 bits = as_bits(v);
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
DEVICE u32 pack_bf16(float low, float high) { return emulated_bf16(high) << 16 | emulated_bf16(low); }
// float16: numbers below 2^-14 are multiples of 2^-24; no NaN comes here.
DEVICE u32 emulated_half(float v) {
  const u32 sign = as_bits(v) >> 16 & 0x8000;
  const double size = std::fabs(static_cast<double>(v));
  if (size >= 65520) return sign | 0x7c00;
  const i32 power = size < std::ldexp(1.0, -14) ? -14 : std::ilogb(size);
  const u32 units = static_cast<u32>(std::nearbyint(std::ldexp(size, 10 - power)));   // 1024 and more: the exponent's part adds up
  return sign | ((static_cast<u32>(power + 14) << 10) + units);
}
DEVICE float emulated_from_half(u32 h) {
  const u32 exponent = h >> 10 & 31, mantissa = h & 1023;
  const float size = exponent ? as_float((exponent + 112) << 23 | mantissa << 13) : static_cast<float>(mantissa) * 0x1p-24f;
  return h & 0x8000 ? -size : size;
}
DEVICE u32 pack_half(float low, float high) { return emulated_half(high) << 16 | emulated_half(low); }
// The product is exact in double precision, and goes to bf16 in one rounding: float32 on the way is rounded to odd.
DEVICE u32 emulated_bf16_product(float a, float b) {
  const double exact = static_cast<double>(a) * static_cast<double>(b);
  float odd = static_cast<float>(exact);
  if (static_cast<double>(odd) != exact && !std::isnan(odd)) {
    u32 bits = as_bits(odd);
    if (std::fabs(static_cast<double>(odd)) > std::fabs(exact)) --bits;
    odd = as_float(bits | 1);
  }
  return emulated_bf16(odd);
}
DEVICE u32 multiply_bf16x2(u32 a, u32 b) {
  return emulated_bf16_product(as_float(a & 0xffff0000u), as_float(b & 0xffff0000u)) << 16 | emulated_bf16_product(as_float(a << 16), as_float(b << 16));
}
DEVICE u32 emulated_bf16_fma(u32 a, u32 b, u32 c) {   // the product has 16 bits; what the sum in double precision loses only matters as "more than" or "less than"
  const double product = static_cast<double>(as_float(a << 16)) * static_cast<double>(as_float(b << 16)), addend = static_cast<double>(as_float(c << 16));
  const double sum = product + addend, other = sum - product, lost = (product - (sum - other)) + (addend - other);
  float odd = static_cast<float>(sum);
  const double rest = (sum - static_cast<double>(odd)) + lost;
  if (rest != 0 && !std::isnan(odd) && !std::isinf(odd)) {
    u32 bits = as_bits(odd);
    if ((rest < 0) == (odd > 0)) --bits;
    odd = as_float(bits | 1);
  }
  return emulated_bf16(odd);
}
DEVICE u32 multiply_add_bf16x2(u32 a, u32 b, u32 c) { return emulated_bf16_fma(a >> 16, b >> 16, c >> 16) << 16 | emulated_bf16_fma(a & 0xffff, b & 0xffff, c & 0xffff); }
DEVICE u32 maximum_u16x2(u32 a, u32 b) { return ((a >> 16) > (b >> 16) ? a & 0xffff0000u : b & 0xffff0000u) | ((a & 0xffff) > (b & 0xffff) ? a & 0xffff : b & 0xffff); }
DEVICE i32 round_to_int(float v) { return v >= 2147483648.0f ? 0x7fffffff : v <= -2147483648.0f ? -0x7fffffff - 1 : static_cast<i32>(std::nearbyintf(v)); }
DEVICE float fused_multiply_add(float a, float b, float c) { return std::fmaf(a, b, c); }
DEVICE float multiply(float a, float b) { return a * b; }
DEVICE float add(float a, float b) { return a + b; }
DEVICE float exponential(float v) { return std::exp(v); }
DEVICE float divide(float a, float b) { return a / b; }

// Fragments as the PTX ISA lays them out, g = lane / 4, t = lane % 4. A: a0 (row g, k 2t and 2t+1), a1 (row g+8), a2 (row g, k 2t+8 and 2t+9), a3 (row g+8);
// B: b0 (k 2t and 2t+1, column g), b1 (k 2t+8 and 2t+9); D: d0, d1 (row g, columns 2t and 2t+1), d2, d3 (row g+8). Sums are float32, in k order.
struct EmulatedBf16 { static float value(u32 half) { return as_float(half << 16); } };
struct EmulatedHalf { static float value(u32 half) { return emulated_from_half(half); } };
template <typename Number> DEVICE void emulated_mma(emulator::Warp& w) {
  using Half = float __attribute__((vector_size(16)));   // of a row of 8
  alignas(16) float a[16][16], b[16][8], d[16][8];
  for (i32 lane = 0; lane < 32; ++lane) {
    const i32 g = lane / 4, t = lane % 4;
    for (i32 i = 0; i < 4; ++i) {
      const i32 row = g + 8 * (i & 1), k = 2 * t + 8 * (i >> 1);
      a[row][k] = Number::value(w.a[lane][i] & 0xffff), a[row][k + 1] = Number::value(w.a[lane][i] >> 16);
      d[g + 8 * (i >> 1)][2 * t + (i & 1)] = w.d[lane][i];
    }
    for (i32 i = 0; i < 2; ++i) {
      const i32 k = 2 * t + 8 * i;
      b[k][g] = Number::value(w.b[lane][i] & 0xffff), b[k + 1][g] = Number::value(w.b[lane][i] >> 16);
    }
  }
  for (i32 row = 0; row < 16; ++row) {
    Half *sum = reinterpret_cast<Half*>(d[row]), left = sum[0], right = sum[1];
    for (i32 k = 0; k < 16; ++k) {
      const Half* of_k = reinterpret_cast<const Half*>(b[k]);
      left += a[row][k] * of_k[0];
      right += a[row][k] * of_k[1];
    }
    sum[0] = left, sum[1] = right;
  }
  for (i32 lane = 0; lane < 32; ++lane)
    for (i32 i = 0; i < 4; ++i) w.d[lane][i] = d[lane / 4 + 8 * (i >> 1)][2 * (lane % 4) + (i & 1)];
}
DEVICE void mma_bf16(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
  emulator::machine.meet(
      emulator::Meeting::kMma, [&](auto& w, u32, i32 lane) { w.a[lane] = a, w.b[lane] = b, w.d[lane] = d; }, [](auto& w, u32) { emulated_mma<EmulatedBf16>(w); });
}
DEVICE void mma_f16(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
  emulator::machine.meet(
      emulator::Meeting::kMmaHalf, [&](auto& w, u32, i32 lane) { w.a[lane] = a, w.b[lane] = b, w.d[lane] = d; }, [](auto& w, u32) { emulated_mma<EmulatedHalf>(w); });
}

// m16n8k32 on int8, as the PTX ISA lays it out: a0 (row g, k 4t .. 4t+3), a1 (row g+8), a2 (row g, k 16+4t ..), a3 (row g+8); b0 (k 4t .., column g), b1 (k 16+4t ..);
// c, d as above.
struct Fragment { u32 of[4]; };
DEVICE void emulated_mma_s8(emulator::Warp& w) {
  i32 a[16][32], b[32][8], d[16][8];
  for (i32 lane = 0; lane < 32; ++lane) {
    const i32 g = lane / 4, t = lane % 4;
    for (i32 i = 0; i < 4; ++i)
      for (i32 j = 0; j < 4; ++j) a[g + 8 * (i & 1)][16 * (i >> 1) + 4 * t + j] = static_cast<signed char>(w.a[lane][i] >> (8 * j));
    for (i32 i = 0; i < 2; ++i)
      for (i32 j = 0; j < 4; ++j) b[16 * i + 4 * t + j][g] = static_cast<signed char>(w.b[lane][i] >> (8 * j));
    for (i32 i = 0; i < 4; ++i) d[g + 8 * (i >> 1)][2 * t + (i & 1)] = w.c32[lane][i];
  }
  for (i32 row = 0; row < 16; ++row)
    for (i32 k = 0; k < 32; ++k)
      for (i32 n = 0; n < 8; ++n) d[row][n] += a[row][k] * b[k][n];
  for (i32 lane = 0; lane < 32; ++lane)
    for (i32 i = 0; i < 4; ++i) w.d32[lane][i] = d[lane / 4 + 8 * (i >> 1)][2 * (lane % 4) + (i & 1)];
}
struct Columns8 { u32 of[2]; };
DEVICE void mma_s8(i32 (&d)[4], const Fragment& a, const Columns8& b, const i32 (&c)[4]) {
  emulator::machine.meet(
      emulator::Meeting::kMmaInteger, [&](auto& w, u32, i32 lane) { w.a[lane] = a.of, w.b[lane] = b.of, w.c32[lane] = c, w.d32[lane] = d; },
      [](auto& w, u32) { emulated_mma_s8(w); });
}

#include "block_scaled.h"
#include "hopper.h"
