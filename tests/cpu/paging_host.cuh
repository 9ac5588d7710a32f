// For tests of fetch.cuh: a kernel that reads rows as a GEMM does, and a thread that acts the mailbox's server, slowly and at the worst moments.
#pragma once
#include "../../src/moet/kernels/paging/fetch.cuh"

#include <atomic>
#include <chrono>
#include <thread>

struct ReadArgs {
  LayerArgs layer;
  const u8* disk;          // [rows][slot_bytes]: what rows should be
  u64* found;              // [steps]: 1 the row's bytes, 2 failed, 3 other bytes; by any block
  i32 wave, parts;
};

// Whether the row of step i is what it should be, in `found`. All threads.
DEVICE void check_row(const ReadArgs& args, i32 i, bool there) {
  const SlotClass& c = *args.layer.slots;
  const Step& step = args.layer.plan->steps[i];
  const u8 *have = c.pool + step.slot * c.slot_bytes, *want = args.disk + step.row * c.slot_bytes;
  bool same = true;
  for (i64 k = thread_id(); there && k < c.slot_bytes; k += thread_count()) same &= have[k] == want[k];
  const bool all = ballot(same) == 0xffffffffu;
  if (thread_id() % 32 == 0) maximum_gpu(args.found + i, there ? (all ? 1 : 3) : 2);
}

// Every block reads every row, as soon as it is there.
KERNEL(read_rows, ReadArgs, args, 512) {
  SHARED(u32, ticket);
  const LayerArgs& a = args.layer;
  Plan& plan = *a.plan;
  if (args.wave >= plan.waves) return;
  if (plan.misses) {
    if (thread_id() == 0) ticket = atomic_add_gpu(&plan.ticket[args.wave], 1);
    sync_block();
    if (ticket < static_cast<u32>(args.parts)) fetch_rows(a, args.wave, static_cast<i32>(ticket), args.parts);
  }
  u64 waited = 0;
  for (i32 i = plan.wave_begin[args.wave]; i < plan.wave_begin[args.wave + 1]; ++i) {
    const bool there = wait_row(a, i, args.parts, waited);
    check_row(args, i, there);
  }
  count_stall(a, args.wave, waited);
}

// The same for rows that were fetched before.
KERNEL(read_scan, ReadArgs, args, 512) {
  const Plan& plan = *args.layer.plan;
  if (args.wave >= plan.waves) return;
  for (i32 i = plan.wave_begin[args.wave]; i < plan.wave_begin[args.wave + 1]; ++i) check_row(args, i, !row_failed(plan, i));
}

KERNEL(count_scan, ReadArgs, args, 512) { count_lost(args.layer); }

struct HostArgs {
  Mailbox* mailbox;
  u64* location;
  u8* arena;
  const u8* disk;
  const u8* fails;         // [rows]
  i32 rows, arena_slots;
  i64 slot_bytes;
  u32 seed, evicts;        // evicts: of 256, how often a quiet moment takes a row out of the arena and puts another one there
  u32 dead, seen;          // dead: nothing is served. seen: requests that came before
  u64 served, evicted, most_pinned;
};

namespace host {
std::thread server;
std::atomic<bool> stop;

class Server {
 public:
  explicit Server(HostArgs& args) : args_(args), random_(args.seed * 2654435761u + 1), row_of_(args.arena_slots, -1), pins_(args.arena_slots, 0) {
    for (i32 row = 0; row < args.rows; ++row)
      if (in_arena(args.location[row])) row_of_[static_cast<u32>(args.location[row]) - 1] = row;
  }
  void run() {
    while (!stop) {
      const u32 posted = __atomic_load_n(&args_.mailbox->posted, __ATOMIC_ACQUIRE);
      release();
      if (__atomic_load_n(&args_.dead, __ATOMIC_ACQUIRE)) {
        std::this_thread::sleep_for(std::chrono::microseconds(200));
        continue;
      }
      for (; seen_ != posted; ++seen_) waiting_.push_back(seen_);
      for (size_t i = 0; i < waiting_.size();) {
        if (serve(waiting_[i])) waiting_.erase(waiting_.begin() + static_cast<i64>(i)); else ++i;
      }
      if ((random() & 255) < args_.evicts) disturb();
      if ((random() & 3) == 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % 60));
    }
  }

 private:
  struct Pin { u32 number; i32 slot; };
  u32 random() { return random_ = random_ * 1664525u + 1013904223u, random_ >> 8; }
  bool taken(u32 number) { return __atomic_load_n(&args_.mailbox->request[number % kMailboxSize].taken, __ATOMIC_ACQUIRE) == number + 1; }
  void release() {
    for (size_t i = 0; i < pinned_.size();)
      if (taken(pinned_[i].number)) --pins_[pinned_[i].slot], pinned_.erase(pinned_.begin() + static_cast<i64>(i)); else ++i;
  }
  void publish(i32 row, u64 location) { __atomic_store_n(&args_.location[row], location, __ATOMIC_SEQ_CST); }
  i32 free_slot() {
    const i32 first = static_cast<i32>(random()) % args_.arena_slots;
    for (i32 i = 0; i < args_.arena_slots; ++i)
      if (const i32 s = (first + i) % args_.arena_slots; pins_[s] == 0) return s;
    return -1;
  }
  void read(i32 row, i32 slot) {
    if (row_of_[slot] >= 0) publish(row_of_[slot], 0);
    std::atomic_thread_fence(std::memory_order_seq_cst);
    u8* to = args_.arena + slot * args_.slot_bytes;
    for (i64 k = 0; k < args_.slot_bytes; ++k) to[k] = static_cast<u8>(random());
    if (random() & 1) sched_yield();
    std::memcpy(to, args_.disk + row * args_.slot_bytes, static_cast<size_t>(args_.slot_bytes));
    row_of_[slot] = row;
    publish(row, static_cast<u64>(++generation_) << 32 | static_cast<u32>(slot + 1));
  }
  bool serve(u32 number) {
    const i32 row = args_.mailbox->request[number % kMailboxSize].row;
    if (taken(number)) return true;   // given up
    if (args_.fails[row]) {
      publish(row, static_cast<u64>(number) << 32 | kFailedLocation);
      return true;
    }
    const u64 now = args_.location[row];
    i32 slot = in_arena(now) ? static_cast<i32>(static_cast<u32>(now)) - 1 : free_slot();
    if (slot < 0) return false;
    ++pins_[slot], pinned_.push_back({number, slot});
    if (pinned_.size() > args_.most_pinned) args_.most_pinned = pinned_.size();
    if (!in_arena(now)) read(row, slot);
    ++args_.served;
    return true;
  }
  void disturb() {
    const i32 slot = free_slot(), row = static_cast<i32>(random()) % args_.rows;
    if (slot < 0 || args_.fails[row] || in_arena(args_.location[row])) return;
    read(row, slot);
    ++args_.evicted;
  }

  HostArgs& args_;
  u32 random_, seen_ = args_.seen, generation_ = 7;
  std::vector<i32> row_of_, pins_;
  std::vector<Pin> pinned_;
  std::vector<u32> waiting_;
};
}  // namespace host

extern "C" void host_start(HostArgs* args) {
  host::stop = false;
  host::server = std::thread([args] { host::Server(*args).run(); });
}
extern "C" void host_stop() {
  host::stop = true;
  host::server.join();
}
