// The names of kernels/gpu/hopper.cuh. What is asynchronous there happens at the last moment that is allowed here, or, for the products of every other block, at
// the first: a kernel that writes registers or tiles too early, or reads sums too early, computes something else in one of the two.
#pragma once
#include <algorithm>
#include <array>

#include "copies.h"

#define KERNEL_ALONE KERNEL

// --- barriers, in the 8 bytes that the hardware's have
struct EmulatedBarrier { u16 count, missing, phase, unused; };
static_assert(sizeof(EmulatedBarrier) == sizeof(u64));
struct EmulatedBulk { void* to; const void* from; u32 bytes; EmulatedBarrier* barrier; bool landed; };
struct EmulatedArrival { std::vector<EmulatedCopy> copies; EmulatedBarrier* barrier; };
struct EmulatedTraffic { std::vector<EmulatedBulk> bulks; std::vector<EmulatedArrival> arrivals; std::map<EmulatedBarrier*, i64> bytes; };   // of a block; bytes: announced less landed
DEVICE EmulatedTraffic& emulated_traffic() {
  static std::map<uint64_t, EmulatedTraffic> of_block;
  return of_block[emulator::machine.current->warp->block->epoch];
}
DEVICE EmulatedBarrier* emulated_barrier(u64* b) { return reinterpret_cast<EmulatedBarrier*>(b); }
DEVICE void emulated_phase(EmulatedBarrier* b) {
  if (b->missing || emulated_traffic().bytes[b]) return;
  b->phase ^= 1, b->missing = b->count;
}
DEVICE void barrier_init(u64* b, u32 count) {
  *emulated_barrier(b) = {static_cast<u16>(count), static_cast<u16>(count), 0, 0};
  emulated_traffic().bytes[emulated_barrier(b)] = 0;
}
DEVICE void barriers_ready() {}
DEVICE void barrier_arrive(u64* b) {
  emulator::machine.perhaps_yield();
  if (!emulated_barrier(b)->missing--) emulator::machine.fail("more arrivals at a barrier than it counts");
  emulated_phase(emulated_barrier(b));
}
DEVICE void barrier_expect(u64* b, u32 bytes) {
  emulated_traffic().bytes[emulated_barrier(b)] += bytes;
  barrier_arrive(b);
}
DEVICE bool emulated_over(u64* b, u32 parity) {
  EmulatedBarrier* barrier = emulated_barrier(b);
  EmulatedTraffic& traffic = emulated_traffic();
  for (EmulatedBulk& bulk : traffic.bulks)
    if (bulk.barrier == barrier) std::memcpy(bulk.to, bulk.from, bulk.bytes), bulk.landed = true, traffic.bytes[barrier] -= bulk.bytes;
  traffic.bulks.erase(std::remove_if(traffic.bulks.begin(), traffic.bulks.end(), [](const EmulatedBulk& bulk) { return bulk.landed; }), traffic.bulks.end());
  for (size_t i = 0; i < traffic.arrivals.size();) {
    if (traffic.arrivals[i].barrier != barrier) {
      ++i;
      continue;
    }
    for (const EmulatedCopy& c : traffic.arrivals[i].copies) std::memcpy(c.to, c.from, c.bytes);
    traffic.arrivals.erase(traffic.arrivals.begin() + static_cast<std::ptrdiff_t>(i));
    if (!barrier->missing--) emulator::machine.fail("more arrivals at a barrier than it counts");
  }
  emulated_phase(barrier);
  return barrier->phase != parity;
}
DEVICE bool barrier_test(u64* b, u32 parity) {
  emulator::machine.yield();
  return emulated_over(b, parity);
}
DEVICE void barrier_wait(u64* b, u32 parity) {
  while (!emulated_over(b, parity)) emulator::machine.yield();
}
DEVICE bool elected() { return thread_id() % 32 == 0; }
DEVICE void bulk_copy(void* to, const void* from, u32 bytes, u64* b) {
  if ((reinterpret_cast<uintptr_t>(to) | reinterpret_cast<uintptr_t>(from) | bytes) % 16) emulator::machine.fail("a bulk copy: expected addresses and bytes that 16 divides");
  std::memset(to, emulator::kUninitialised, bytes);
  emulated_traffic().bulks.push_back({to, from, bytes, emulated_barrier(b), false});
}
DEVICE void copies_arrive(u64* b) {
  emulator::machine.perhaps_yield();
  std::vector<EmulatedCopy>& mine = emulated_copies().under_way;
  emulated_traffic().arrivals.push_back({mine, emulated_barrier(b)});
  mine.clear();
}
using SharedAt = u8*;
DEVICE SharedAt shared_at(const void* p) { return static_cast<u8*>(const_cast<void*>(p)); }
DEVICE SharedAt uniform_at(SharedAt at) { return at; }
template <i32 to_by, i32 from_by> DEVICE void copy_async16_by(SharedAt to, const u8* from) { copy_async16(to + to_by, from + from_by); }
template <i32 by> DEVICE u32 load_word_by(SharedAt at) { u32 v; std::memcpy(&v, at + by, sizeof v); return v; }
template <i32 by> DEVICE void load_two_words_by(SharedAt at, u32& a, u32& b) {
  if (reinterpret_cast<uintptr_t>(at + by) % 8) emulator::machine.fail("a load of two words: expected an address that 8 divides");
  a = load_word_by<by>(at), b = load_word_by<by + 4>(at);
}
template <i32 by> DEVICE u32 load_byte_by(SharedAt at) { return at[by]; }
DEVICE u32 load_word_at(SharedAt table, u32 place) { return load_word_by<0>(table + place); }
DEVICE const u8* unit_of(const u8* base, u32 index) { return base + static_cast<u64>(index) * 16; }
DEVICE void store_word_if(bool there, u16* base, u32 index, u32 word) {
  if (there) std::memcpy(base + index, &word, sizeof word);
}
DEVICE void fence_async() { emulator::machine.perhaps_yield(); }
DEVICE void fence_async_shared() { emulator::machine.perhaps_yield(); }

template <i32 n> DEVICE void fewer_registers() {}
template <i32 n> DEVICE void more_registers() {}
DEVICE u8* align_shared(u8* p) { return p + (-reinterpret_cast<uintptr_t>(p) & 1023u); }

// --- products
using TileDescriptor = u64;
constexpr u64 kDescriptorStep = 32;
DEVICE TileDescriptor tile_descriptor(const void* tile) {
  if (reinterpret_cast<uintptr_t>(tile) % 1024) emulator::machine.fail("a swizzled tile: expected an address that 1024 divides");
  return reinterpret_cast<uintptr_t>(tile);
}
struct EmulatedProduct {
  i32 n, steps;
  u64 tile;
  bool adds;
  std::array<float*, 32> d;
  std::array<const u32*, 32> a;
  size_t group;
};
struct EmulatedProducts { std::vector<EmulatedProduct> under_way; size_t group = 0; };
DEVICE EmulatedProducts& emulated_products(const emulator::Warp& w) {
  static std::map<std::pair<uint64_t, const emulator::Warp*>, EmulatedProducts> of_warp;
  return of_warp[{w.block->epoch, &w}];
}
DEVICE void emulated_multiply(const EmulatedProduct& p) {
  for (i32 column = 0; column < p.n; ++column)
    for (i32 step = 0; step < p.steps; ++step) {
      float b[16];
      for (i32 k = 0; k < 16; ++k) {
        u64 address = p.tile + static_cast<u64>(128 * column + 32 * step + 2 * k);
        address ^= (address >> 7 & 7) << 4;
        u16 value;
        std::memcpy(&value, reinterpret_cast<const void*>(address), sizeof value);
        b[k] = as_float(static_cast<u32>(value) << 16);
      }
      for (i32 row = 0; row < 16; ++row) {
        const i32 lane = row % 8 * 4, i = row / 8;
        float& d = p.d[lane + column % 8 / 2][column / 8 * 4 + 2 * i + column % 2];
        float sum = step || p.adds ? d : 0.0f;
        for (i32 k = 0; k < 16; ++k) {
          const u32 pair = p.a[lane + k % 8 / 2][4 * step + i + 2 * (k / 8)];
          sum += as_float(k % 2 ? pair & 0xffff0000u : pair << 16) * b[k];
        }
        d = sum;
      }
    }
}
template <i32 steps, i32 size> DEVICE void multiply_tile(float (&d)[size], const u32* a, TileDescriptor tile, i32 units, bool adds) {
  if (units < 1 || 8 * units > size) emulator::machine.fail("a product: expected 16 columns for 8 sums of a thread, at most as many as there are sums");
  struct Operands { float* d; const u32* a; } mine = {d, a};
  emulator::machine.meet(
      emulator::Meeting::kMma, [&](auto& w, u32 at, i32 lane) { w.value[at][lane] = reinterpret_cast<u64>(&mine); },
      [&](auto& w, u32 at) {
        EmulatedProducts& products = emulated_products(w);
        EmulatedProduct p = {16 * units, steps, tile, adds, {}, {}, products.group++};
        for (i32 lane = 0; lane < 32; ++lane) {
          const Operands* of = reinterpret_cast<const Operands*>(w.value[at][lane]);
          p.d[lane] = of->d, p.a[lane] = of->a;
        }
        if (w.block->epoch % 2) emulated_multiply(p);
        else products.under_way.push_back(p);
      });
}
template <i32 n> DEVICE void products_wait() {
  emulator::machine.meet(emulator::Meeting::kSync, [](auto&, u32, i32) {}, [](auto& w, u32) {
    EmulatedProducts& products = emulated_products(w);
    size_t done = 0;
    for (; done < products.under_way.size() && products.under_way[done].group + n < products.group; ++done) emulated_multiply(products.under_way[done]);
    products.under_way.erase(products.under_way.begin(), products.under_way.begin() + static_cast<std::ptrdiff_t>(done));
  });
}
DEVICE void keep_registers(const u32 (&)[16], SharedAt) {}
template <i32 size> DEVICE void settle(float (&)[size]) {}
