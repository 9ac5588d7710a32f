// The names of kernels/gpu/copies.cuh. A copy lands when its thread waits for it; until then the bytes are poison.
#pragma once
#include <map>
#include <utility>
#include <vector>

struct EmulatedCopy { void* to; const void* from; size_t bytes; size_t group; };
struct EmulatedCopies {
  std::vector<EmulatedCopy> under_way;
  size_t group = 0;   // the one that is being filled
};
DEVICE EmulatedCopies& emulated_copies() {
  static std::map<std::pair<uint64_t, int>, EmulatedCopies> of_thread;   // of a block's run and thread
  return of_thread[{emulator::machine.current->warp->block->epoch, thread_id()}];
}
DEVICE void emulated_copy(void* to, const void* from, size_t bytes) {
  std::memset(to, emulator::kUninitialised, bytes);
  EmulatedCopies& mine = emulated_copies();
  mine.under_way.push_back({to, from, bytes, mine.group});
}
DEVICE void copy_async16(void* to, const void* from) { emulated_copy(to, from, 16); }
DEVICE void copy_async16_if(bool there, u32 to, const void* from) {
  if (there) emulated_copy(emulator::machine.dynamic() + (to - kEmulatedDynamic), from, 16);
}
DEVICE void copy_async4(void* to, const void* from) { emulated_copy(to, from, 4); }
DEVICE void emulated_landing(size_t before) {   // of the groups below `before`
  emulator::machine.perhaps_yield();
  std::vector<EmulatedCopy>& copies = emulated_copies().under_way;
  size_t done = 0;
  for (; done < copies.size() && copies[done].group < before; ++done) std::memcpy(copies[done].to, copies[done].from, copies[done].bytes);
  copies.erase(copies.begin(), copies.begin() + static_cast<std::ptrdiff_t>(done));
}
DEVICE void copies_landed() { emulated_landing(emulated_copies().group + 1); }
DEVICE void commit_copies() { ++emulated_copies().group; }
template <i32 n> DEVICE void wait_copies() {
  const size_t group = emulated_copies().group;
  emulated_landing(group > n ? group - n : 0);
}
DEVICE void load_matrices(u32* m, const void* row) {
  emulator::Warp& w = *emulator::machine.current->warp;
  const u32 place = emulator::machine.meet(
      emulator::Meeting::kShuffle, [row](auto& warp, u32 at, i32 lane) { warp.value[at][lane] = reinterpret_cast<u64>(row); }, [](auto&, u32) {});
  const i32 lane = thread_id() % 32;
  for (i32 i = 0; i < 4; ++i) std::memcpy(&m[i], reinterpret_cast<const u8*>(w.value[place][8 * i + lane / 4]) + 4 * (lane % 4), 4);
}
