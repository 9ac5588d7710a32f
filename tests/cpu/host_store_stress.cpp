// Threads that act as a GPU: they post requests, copy rows while the server may overwrite them, look at the location word again, and
// compare every byte of a copy that they accept. Run plain and under sanitizers by test_host_store_stress.py. Usage: host_store_stress
// FILE LAYERS EXPERTS HIDDEN INTER SLOTS THREADS ROUNDS SEED
#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <random>
#include <set>
#include <thread>

#include "../../native/store/host_store.h"
#include "../../src/moet/kernels/paging/state.cuh"

// One protocol, written down twice: for kernels and for the server.
static_assert(sizeof(::Mailbox) == sizeof(moet::Mailbox) && sizeof(::Request) == sizeof(moet::MailboxRequest));
static_assert(::kMailboxSize == moet::kMailboxSize && ::kFailedLocation == moet::kFailedLocation);
static_assert(offsetof(::Mailbox, posted) == offsetof(moet::Mailbox, posted));
static_assert(offsetof(::Mailbox, stop) == offsetof(moet::Mailbox, stop));
static_assert(offsetof(::Mailbox, request) == offsetof(moet::Mailbox, request));
static_assert(offsetof(::Request, cls) == offsetof(moet::MailboxRequest, cls));
static_assert(offsetof(::Request, row) == offsetof(moet::MailboxRequest, row));
static_assert(offsetof(::Request, taken) == offsetof(moet::MailboxRequest, taken));

namespace {

using Clock = std::chrono::steady_clock;
constexpr auto kLimit = std::chrono::seconds(60);   // without progress
std::atomic<uint32_t> drawn{0};
std::atomic<long> checked{0}, failed{0}, torn{0}, requested{0}, wrong{0};

uint32_t post(moet::Mailbox& box, int32_t row) {
  const uint32_t number = drawn.fetch_add(1);
  moet::MailboxRequest& request = box.request[number % moet::kMailboxSize];
  request.cls = 0;
  request.row = row;
  while (box.posted.load(std::memory_order_acquire) != number) std::this_thread::yield();   // posted counts without gaps
  box.posted.store(number + 1, std::memory_order_release);
  ++requested;
  return number;
}

// The bytes may change while they are copied, which is what the second look is for; ThreadSanitizer would call it a race.
__attribute__((no_sanitize("thread"), noinline)) void copy(uint64_t* to, const uint8_t* from, int64_t bytes, bool slow) {
  const volatile uint64_t* words = reinterpret_cast<const volatile uint64_t*>(from);
  for (int64_t i = 0; i < bytes / 8; ++i) {
    to[i] = words[i];
    if (slow && i % 128 == 127) std::this_thread::yield();
  }
}

struct Row { int32_t expert, row; uint32_t number = 0; bool asked = false, kept = false, done = false; };

class Device {
 public:
  Device(moet::HostStore& store, const std::vector<char>& file, const moet::RowGeometry& g, int layers, int experts, int rounds,
         bool alone, unsigned seed)
      : store_(store), box_(*store.mailbox()), file_(file), g_(g), layers_(layers), experts_(experts), rounds_(rounds), alone_(alone), rng_(seed) {}

  void run() {
    for (int round = 0; round < rounds_ && !wrong; ++round) step();
  }

 private:
  void step() {
    const int layer = static_cast<int>(rng_() % layers_);
    std::set<int32_t> set;
    const size_t count = rng_() % 6 == 0 ? experts_ : 1 + rng_() % 6;
    while (set.size() < count) set.insert(static_cast<int32_t>(rng_() % experts_));
    std::vector<Row> rows;
    for (const int32_t e : set) rows.push_back({e, layer * experts_ + e});
    std::shuffle(rows.begin(), rows.end(), rng_);
    for (Row& r : rows)   // all requests of a layer before any wait
      if (rng_() % 16 == 0 || absent(r)) ask(r);
    auto progress = Clock::now();
    for (size_t left = rows.size(); left > 0 && !wrong;) {
      bool any = false;
      for (Row& r : rows)   // in whatever order they arrive
        if (!r.done && look(r)) r.done = any = true, --left;
      if (any) progress = Clock::now();
      else if (Clock::now() - progress > kLimit) {
        std::printf("no progress: %zu rows of layer %d wait\n", left, layer);
        wrong = 1;
      } else std::this_thread::yield();
    }
  }

  moet::Location& location(const Row& r) { return store_.shelves()[0].location()[r.row]; }
  bool absent(const Row& r) {
    const uint32_t place = static_cast<uint32_t>(location(r).load(std::memory_order_acquire));
    return place == 0 || place == moet::kFailedLocation;
  }
  // A row that is there while it is asked for may go before the server has seen the request. One that only this device asks for, and
  // that was not there, is kept from its publication on.
  void ask(Row& r) {
    r.kept = alone_ && absent(r);
    r.number = post(box_, r.row);
    r.asked = true;
  }
  void taken(Row& r) {
    if (r.asked) box_.request[r.number % moet::kMailboxSize].taken.store(r.number + 1, std::memory_order_release);
    r.asked = false;
  }

  bool look(Row& r) {   // true: the row is done with
    const uint64_t before = location(r).load(std::memory_order_acquire);
    const uint32_t place = static_cast<uint32_t>(before);
    if (place == moet::kFailedLocation && r.asked && static_cast<int32_t>(static_cast<uint32_t>(before >> 32) - r.number) >= 0) {
      ++failed;
      taken(r);
      return true;
    }
    if (place == 0 || place == moet::kFailedLocation) {
      if (!r.asked) ask(r);   // it was there when the layer began
      return false;
    }
    const moet::SlotLayout& layout = store_.layout(0);
    buffer_.resize(static_cast<size_t>(layout.slot_bytes) / 8);
    copy(buffer_.data(), store_.shelves()[0].memory(static_cast<int32_t>(place) - 1), layout.slot_bytes, rng_() % 2);
    std::atomic_thread_fence(std::memory_order_acquire);
    if (location(r).load(std::memory_order_relaxed) != before) {
      ++torn;
      if (r.asked && r.kept) {
        std::printf("a requested row lost its slot: row %d, request %u\n", r.row, r.number);
        wrong = 1;
      }
      return false;
    }
    taken(r);
    const moet::RowView view = layout.view(reinterpret_cast<const uint8_t*>(buffer_.data()));
    const uint8_t* parts[3] = {view.w13, view.w2, view.extras};
    const char* want = file_.data() + r.row * g_.row_bytes();
    for (int k = 0; k < 3; ++k)
      if (std::memcmp(parts[k], want + layout.slice.offset[k], static_cast<size_t>(layout.slice.length[k])) != 0) {
        std::printf("row %d, part %d differs\n", r.row, k);
        wrong = 1;
      }
    ++checked;
    return true;
  }

  moet::HostStore& store_;
  moet::Mailbox& box_;
  const std::vector<char>& file_;
  const moet::RowGeometry g_;
  const int layers_, experts_, rounds_;
  const bool alone_;
  std::mt19937 rng_;
  std::vector<uint64_t> buffer_;
};

}  // namespace

int main(int argc, char** argv) {
  if (argc != 10) return 2;
  const int layers = std::atoi(argv[2]), experts = std::atoi(argv[3]), slots = std::atoi(argv[6]), threads = std::atoi(argv[7]),
            rounds = std::atoi(argv[8]);
  const unsigned seed = static_cast<unsigned>(std::atoi(argv[9]));
  std::ifstream in(argv[1], std::ios::binary);
  const std::vector<char> file((std::istreambuf_iterator<char>(in)), {});
  const moet::RowGeometry g{moet::kSym2, std::atoi(argv[4]), std::atoi(argv[5]), 0};
  std::vector<moet::LayerSource> sources;
  for (int l = 0; l < layers; ++l) sources.push_back({argv[1], l * experts * g.row_bytes(), experts, g, l});
  moet::HostOptions options;
  options.ram_bytes = slots * g.row_bytes();
  options.chunk_bytes = 4096;
  moet::HostStore store(sources, options);
  std::vector<uint32_t> heat(static_cast<size_t>(layers) * experts);
  std::vector<std::unique_ptr<Device>> devices;
  std::vector<std::thread> running;
  std::atomic<int> ended{0};
  for (int t = 0; t < threads; ++t) {
    devices.push_back(std::make_unique<Device>(store, file, g, layers, experts, rounds, threads == 1, 100 * seed + t));
    running.emplace_back([&ended, device = devices.back().get()] { device->run(), ++ended; });
  }
  std::mt19937 rng(seed);
  while (ended < threads) {   // the host meanwhile: faults, heat, rows read ahead
    static const int64_t kinds[4][2] = {
        {moet::Fault::kErrno, EIO}, {moet::Fault::kShort, 4096}, {moet::Fault::kDelay, 300}, {moet::Fault::kCorrupt, 9}};
    const auto& f = kinds[rng() % 4];
    store.inject(static_cast<int>(rng() % layers), static_cast<int>(rng() % experts), static_cast<int>(f[0]), f[1], 1 + rng() % 3);
    if (rng() % 8 == 0) {
      store.heat(heat.data());
      for (uint32_t& h : heat) h += rng() % 3;
      store.set_heat(heat.data());
      store.plan_fill();
      store.fill(2);
    }
    std::this_thread::sleep_for(std::chrono::microseconds(500));
  }
  for (std::thread& t : running) t.join();
  std::printf("checked %ld failed %ld torn %ld requested %ld evictions %ld\n", checked.load(), failed.load(), torn.load(),
              requested.load(), static_cast<long>(store.counters().evictions.load()));
  return wrong ? 1 : 0;
}
