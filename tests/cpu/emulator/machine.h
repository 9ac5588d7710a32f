// Runs a grid of blocks in one OS thread: every CUDA thread is a fiber, warps and blocks meet where the kernel says so, and a seeded scheduler chooses who
// goes on, so that a test can explore interleavings. `resident` blocks run at a time, as on a GPU whose SMs are full; the next begins when one ends.
//
// A launch ends with an error, and its fibers are dropped, when lanes of a warp stand at different operations, when nothing can go on, when it takes longer
// than the limit, or when somebody wrote behind a stack or the dynamic shared memory.
#pragma once
#include <sched.h>
#include <sys/mman.h>
#include <time.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <vector>

#include "fiber.h"

namespace emulator {

constexpr size_t kStackBytes = 64 << 10, kGuard = 128;
constexpr unsigned char kUninitialised = 0xcb, kCanary = 0xa7;
constexpr uint32_t kAllLanes = 0xffffffffu;

struct Warp;
struct Block;
struct Fiber {
  Context context;
  char* stack = nullptr;
  Warp* warp = nullptr;
  int lane = 0, thread = 0;
};

enum class Meeting : uint32_t { kNone, kSync, kBallot, kShuffle, kMma, kMmaHalf, kMmaInteger };

struct Warp {
  Block* block = nullptr;
  Fiber* fibers = nullptr;                        // 32
  uint32_t ready = 0, live = 0, arrived = 0, barrier = 0;   // lanes
  Meeting meeting = Meeting::kNone;
  uint32_t generation = 0;                        // of meetings; what they hand over has two places, taken in turns
  uint32_t votes[2] = {};
  uint64_t value[2][32] = {};
  const uint32_t *a[32] = {}, *b[32] = {};
  float* d[32] = {};
  const int32_t* c32[32] = {};
  int32_t* d32[32] = {};
  int next = 0;                                   // lane to look at first
  int place = -1;                                 // in Machine::ready
};

struct SharedVariable { const void* key; void* memory; uint64_t epoch; };

struct Block {
  int id = 0, live = 0, waiting = 0;
  bool slow = false;
  uint64_t epoch = 0;
  std::vector<Fiber> fibers;
  std::vector<Warp> warps;
  std::vector<SharedVariable> shared;
  unsigned char* dynamic = nullptr;
};

inline uint64_t clock_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return static_cast<uint64_t>(t.tv_sec) * 1000000000u + static_cast<uint64_t>(t.tv_nsec);
}

class Machine {
 public:
  Fiber* current = nullptr;
  int blocks = 0, threads = 0;
  int resident_limit = 16;
  double limit_s = 60;
  char error[256] = {};

  int launch(void (*body)(const void*), const void* args, int blocks_, int threads_, int max_threads, int shared_bytes, uint64_t seed) {
    const std::lock_guard<std::mutex> one(mutex_);
    error[0] = 0;
    if (blocks_ < 1 || threads_ < 32 || threads_ > max_threads || threads_ % 32) {
      std::snprintf(error, sizeof error, "a launch of %d blocks of %d threads: expected whole warps, at most %d threads", blocks_, threads_, max_threads);
      return 1;
    }
    body_ = body, args_ = args, blocks = blocks_, threads = threads_, shared_bytes_ = shared_bytes;
    random_ = seed * 0x9e3779b97f4a7c15u + 1, seeded_ = seed != 0, next_block_ = 0, finished_ = nullptr, spins_ = 0, cursor_ = 0;
    deadline_ = clock_ns() + static_cast<uint64_t>(limit_s * 1e9);
    ready_.clear();
    const int resident = resident_limit < blocks ? resident_limit : blocks;
    while (static_cast<int>(pool_.size()) < resident) pool_.push_back(new Block);
    for (int i = 0; i < resident; ++i) begin(*pool_[i]);
    int running = resident;
    while (running && !error[0]) {
      if (ready_.empty()) {
        fail_text("deadlock: every thread waits for another one");
        break;
      }
      current = pick(true);
      switch_context(main_, current->context);
      if (finished_) {
        Block& block = *finished_;
        finished_ = nullptr;
        if (!check(block)) break;
        if (next_block_ < blocks) begin(block); else --running;
      }
    }
    current = nullptr;
    return error[0] ? 1 : 0;
  }

  // The fiber goes on some time later; others first.
  void yield() {
    if (++spins_ % 4096 == 0) {
      sched_yield();
      if (clock_ns() > deadline_) fail("the launch took longer than its limit");
    }
    Fiber& me = *current;
    make_ready(*me.warp, 1u << me.lane);
    go_on(true);
  }

  // A point where other threads may run in between: taken seldom, and only if a seed was given.
  void perhaps_yield() {
    if (seeded_ && (random() & 7) == 0) yield();
  }

  // All lanes of the warp come here; the last one runs `complete`. Returns the place (0 or 1) of what they hand over.
  template <typename Put, typename Complete>
  uint32_t meet(Meeting meeting, Put put, Complete complete) {
    Fiber& me = *current;
    Warp& w = *me.warp;
    if (w.live != kAllLanes) fail("a lane of this warp has ended, and another one asks for the whole warp");
    if (!w.arrived) w.meeting = meeting;
    else if (w.meeting != meeting) fail("lanes of a warp stand at different operations");
    const uint32_t place = w.generation & 1;
    put(w, place, me.lane);
    w.arrived |= 1u << me.lane;
    if (w.arrived == kAllLanes) {
      complete(w, place);
      w.arrived = 0;
      ++w.generation;
      make_ready(w, kAllLanes);
    }
    go_on(false);
    return place;
  }

  void block_barrier() {
    Fiber& me = *current;
    Block& block = *me.warp->block;
    me.warp->barrier |= 1u << me.lane;
    if (++block.waiting == block.live) release(block);
    go_on(false);
  }

  void* shared(const void* key, size_t bytes, size_t alignment) {
    Block& block = *current->warp->block;
    for (SharedVariable& v : block.shared)
      if (v.key == key) {
        if (v.epoch != block.epoch) std::memset(v.memory, kUninitialised, bytes), v.epoch = block.epoch;
        return v.memory;
      }
    alignment = alignment < 16 ? 16 : alignment;
    void* memory = std::aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);
    std::memset(memory, kUninitialised, bytes);
    block.shared.push_back({key, memory, block.epoch});
    return memory;
  }

  unsigned char* dynamic() { return current->warp->block->dynamic; }

  [[noreturn]] void fail(const char* what) {
    fail_text(what);
    switch_context(current->context, main_);
    std::abort();
  }

 private:
  static void run();

  void fail_text(const char* what) {
    if (current) std::snprintf(error, sizeof error, "block %d, thread %d: %s", current->warp->block->id, current->thread, what);
    else std::snprintf(error, sizeof error, "%s", what);
  }

  uint64_t random() {
    random_ ^= random_ << 13;
    random_ ^= random_ >> 7;
    return random_ ^= random_ << 17;
  }

  void begin(Block& block) {
    block.id = next_block_++, block.live = threads, block.waiting = 0, block.epoch = ++epoch_;
    block.slow = seeded_ && (random() & 3) == 0;
    if (static_cast<int>(block.fibers.size()) < threads) {
      const size_t had = block.fibers.size();
      block.fibers.resize(threads);
      const size_t bytes = (threads - had) * kStackBytes;
      auto* stacks = static_cast<char*>(mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
      if (stacks == MAP_FAILED) std::abort();
      for (size_t i = had; i < block.fibers.size(); ++i) block.fibers[i].stack = stacks + (i - had) * kStackBytes;
    }
    block.warps.assign(threads / 32, Warp{});
    for (int t = 0; t < threads; ++t) {
      Fiber& f = block.fibers[t];
      f.warp = &block.warps[t / 32], f.lane = t % 32, f.thread = t;
      std::memset(f.stack, kCanary, kGuard);
      // Tops differ, or the first lines of all stacks would share one set of the cache.
      f.context.start(f.stack, kStackBytes - (t * 832) % 8192, &Machine::run);
    }
    for (Warp& w : block.warps) {
      w.block = &block, w.fibers = &block.fibers[(&w - block.warps.data()) * 32], w.live = kAllLanes;
      make_ready(w, kAllLanes);
    }
    std::free(block.dynamic);
    const size_t bytes = (static_cast<size_t>(shared_bytes_) + 127) / 128 * 128;
    block.dynamic = static_cast<unsigned char*>(std::aligned_alloc(128, bytes + kGuard));
    std::memset(block.dynamic, kUninitialised, shared_bytes_);
    std::memset(block.dynamic + shared_bytes_, kCanary, bytes + kGuard - shared_bytes_);
  }

  bool check(Block& block) {
    static const std::vector<unsigned char> canary(kGuard, kCanary);
    current = nullptr;
    for (int t = 0; t < threads; ++t)
      if (std::memcmp(block.fibers[t].stack, canary.data(), kGuard)) fail_text("a thread used more than 64 KiB of stack");
    if (std::memcmp(block.dynamic + shared_bytes_, canary.data(), kGuard)) fail_text("a write behind the dynamic shared memory");
    return !error[0];
  }

  void make_ready(Warp& w, uint32_t lanes) {
    w.ready |= lanes;
    if (w.place < 0) {
      w.place = static_cast<int>(ready_.size());
      ready_.push_back(&w);
    }
  }

  void release(Block& block) {
    block.waiting = 0;
    for (Warp& w : block.warps)
      if (w.barrier) make_ready(w, w.barrier), w.barrier = 0;
  }

  Fiber* pick(bool leave) {
    Warp* w = current ? current->warp : nullptr;
    const uint64_t dice = seeded_ ? random() : ~uint64_t{0};
    if (!w || !w->ready || leave || (dice & 15) == 0) {
      const size_t n = ready_.size();
      if (seeded_) {
        w = ready_[(dice >> 32) % n];
        if (w->block->slow && (random() & 31)) w = ready_[random() % n];
      } else {
        cursor_ = cursor_ + 1 < n ? cursor_ + 1 : 0;
        w = ready_[cursor_];
      }
    }
    if ((dice >> 8 & 31) == 0) w->next = static_cast<int>(dice >> 16 & 31);
    uint32_t lanes = w->ready & (kAllLanes << w->next);
    if (!lanes) lanes = w->ready;
    const int lane = __builtin_ctz(lanes);
    w->next = (lane + 1) & 31;
    w->ready &= ~(1u << lane);
    if (!w->ready) {
      ready_[w->place] = ready_.back();
      ready_[w->place]->place = w->place;
      ready_.pop_back();
      w->place = -1;
    }
    return &w->fibers[lane];
  }

  void go_on(bool leave) {
    if (ready_.empty()) fail("deadlock: every thread waits for another one");
    Fiber* from = current;
    Fiber* to = pick(leave);
    if (to == from) return;
    current = to;
    switch_context(from->context, to->context);
  }

  void end() {
    Fiber& me = *current;
    Warp& w = *me.warp;
    Block& block = *w.block;
    w.live &= ~(1u << me.lane);
    if (w.arrived) fail("a thread ended while lanes of its warp wait for it");
    if (--block.live == 0) {
      finished_ = &block;
      switch_context(me.context, main_);
    }
    if (block.waiting && block.waiting == block.live) release(block);
    go_on(false);
  }

  std::mutex mutex_;
  Context main_;
  void (*body_)(const void*) = nullptr;
  const void* args_ = nullptr;
  int shared_bytes_ = 0, next_block_ = 0;
  uint64_t random_ = 1, deadline_ = 0, spins_ = 0, epoch_ = 0;
  size_t cursor_ = 0;
  bool seeded_ = false;
  Block* finished_ = nullptr;
  std::vector<Block*> pool_;
  std::vector<Warp*> ready_;
};

inline Machine machine;

inline void Machine::run() {
  machine.body_(machine.args_);
  machine.end();
  std::abort();
}

}  // namespace emulator

extern "C" inline __attribute__((used)) const char* emulator_error() { return emulator::machine.error; }
extern "C" inline __attribute__((used)) void emulator_configure(int resident, double limit_s) {
  emulator::machine.resident_limit = resident, emulator::machine.limit_s = limit_s;
}
