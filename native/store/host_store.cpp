#include "host_store.h"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <new>
#include <stdexcept>
#include <sys/mman.h>
#include <thread>

#include "bookkeeping.h"
#include "verify.h"

namespace moet {

HostStore::HostStore(const std::vector<LayerSource>& layers, const HostOptions& options)
    : layers_(layers),
      options_(options),
      class_of_(layers.size()),
      first_row_(layers.size()),
      counters_(options.counters_path) {
  if (options.world < 1 || options.rank < 0 || options.rank >= options.world)
    throw std::runtime_error("host store: expected 0 <= rank < world, found rank " + std::to_string(options.rank) + " of " +
                             std::to_string(options.world));
  if (options.io_threads < 1 || options.chunk_bytes < kPage || options.chunk_bytes % kPage)
    throw std::runtime_error("host store: expected io_threads >= 1 and chunk_bytes a multiple of 4096, found " +
                             std::to_string(options.io_threads) + " and " + std::to_string(options.chunk_bytes));
  for (size_t i = 0; i < layers_.size(); ++i) {
    if (layers_[i].index < 0) layers_[i].index = static_cast<int32_t>(i);
    layouts_.emplace_back(layers_[i].geometry, options.rank, options.world);
  }
  const std::vector<SlotClass> classes = make_classes(layers_, layouts_, options.ram_bytes);
  int64_t arena_bytes = 0, control_bytes = sizeof(Mailbox);
  int32_t slots = 0;
  bool requests = false;
  for (const SlotClass& k : classes) {
    arena_bytes += k.slots * k.slot_bytes;
    control_bytes += (k.rows * 8 + 63) / 64 * 64;   // each class's words begin a cache line
    slots += k.slots;
    requests |= k.slots < k.rows;
    add(counters_->rows_total, static_cast<uint64_t>(k.rows));
    add(counters_->bytes_total, static_cast<uint64_t>(k.rows * k.slot_bytes));
  }
  set(counters_->arena_bytes, static_cast<uint64_t>(arena_bytes));
  set(counters_->arena_slots, static_cast<uint64_t>(slots));
  arena_ = std::make_unique<Arena>(arena_bytes);
  control_ = std::make_unique<Arena>((control_bytes + kPage - 1) / kPage * kPage);
  mailbox_ = new (control_->data()) Mailbox{};
  uint8_t* words = control_->data() + sizeof(Mailbox);
  shelves_.reserve(classes.size());
  for (size_t c = 0; c < classes.size(); ++c) {
    const SlotClass& k = classes[c];
    Location* location = reinterpret_cast<Location*>(words);
    for (int64_t r = 0; r < k.rows; ++r) new (location + r) Location(0);
    shelves_.emplace_back(k, layers_, arena_->data() + k.offset, location);
    words += (k.rows * 8 + 63) / 64 * 64;
    int32_t row = 0;
    for (const int layer : k.layers) {
      class_of_[layer] = static_cast<int>(c);
      first_row_[layer] = row;
      row += layers_[layer].experts;
    }
  }
  reader_ = std::make_unique<Reader>(
      layers_, layouts_, slots,
      ReaderOptions{options.io_threads, options.direct_io != 0, options.verify != 0, options.chunk_bytes}, *counters_);
  for (size_t i = 0; i < layers_.size() && warning_.empty() && options.direct_io; ++i)
    if (const RowFile* f = reader_->file(static_cast<int>(i)); f && !f->direct())
      warning_ = "row file " + f->path() + ": O_DIRECT does not work here (" + f->why_buffered() +
                 "); reading through the page cache";
  if (requests) server_ = std::make_unique<MailboxServer>(*mailbox_, shelves_, *reader_, lock_, *counters_);
}

int HostStore::checked(int layer, int expert) const {
  if (layer < 0 || layer >= static_cast<int>(layers_.size()))
    throw std::runtime_error("host store: expected a layer of 0.." + std::to_string(layers_.size()) + " (exclusive), found " +
                             std::to_string(layer));
  if (expert < 0 || expert >= layers_[layer].experts)
    throw std::runtime_error("layer " + std::to_string(layers_[layer].index) + ": expected an expert of 0.." +
                             std::to_string(layers_[layer].experts) + " (exclusive), found " + std::to_string(expert));
  return layer;
}

int64_t HostStore::plan_fill() {
  std::lock_guard<std::mutex> lock(lock_);
  wanted_.clear();
  for (size_t c = 0; c < shelves_.size(); ++c) {
    Shelf& s = shelves_[c];
    std::vector<int32_t> rows;
    int32_t free = s.slot_class().slots;
    for (int32_t r = 0; r < s.rows(); ++r) {
      if (s.slot_of(r) >= 0) --free;
      else if (s.readable(r) && (s.resident() || s.heat()[r] > 0)) rows.push_back(r);
    }
    std::stable_sort(rows.begin(), rows.end(), [&](int32_t a, int32_t b) { return s.heat()[a] > s.heat()[b]; });
    if (static_cast<int64_t>(rows.size()) > free) rows.resize(static_cast<size_t>(std::max(free, 0)));
    for (const int32_t r : rows) wanted_.push_back({static_cast<int32_t>(c), r});
  }
  // In file order, last first: neighbours in a file become neighbours in the queue.
  const auto place = [&](const Wanted& w) {
    const ReadJob job = shelves_[w.cls].job(w.row, 0);
    return std::make_pair(job.layer, job.expert);
  };
  std::sort(wanted_.begin(), wanted_.end(), [&](const Wanted& a, const Wanted& b) { return place(a) > place(b); });
  return static_cast<int64_t>(wanted_.size());
}

int64_t HostStore::fill(int64_t limit) {
  std::lock_guard<std::mutex> lock(lock_);
  if (wanted_.empty()) return -1;
  struct Read { int32_t cls, slot, all; };
  std::vector<ReadJob> jobs;
  std::vector<Read> reads;
  for (; limit > 0 && !wanted_.empty(); --limit, wanted_.pop_back()) {
    const auto [cls, row] = wanted_.back();
    Shelf& s = shelves_[cls];
    if (s.slot_of(row) >= 0) continue;   // a request came first
    const int32_t slot = s.choose(row, false);
    if (slot < 0) continue;
    s.claim(row, slot);
    jobs.push_back(s.job(row, slot));
    reads.push_back({cls, slot, jobs.back().slot});
  }
  reader_->post(jobs, true);
  size_t landed = 0;   // asked after each row: what has landed is not looked at again
  reader_->wait([&] {
    while (landed < reads.size() && reader_->state(reads[landed].all) != SlotState::kFilling) ++landed;
    return landed == reads.size();
  });
  int64_t good = 0;
  std::string failure;
  for (const Read& r : reads) {
    Shelf& s = shelves_[r.cls];
    if (reader_->state(r.all) == SlotState::kValid) {
      s.publish(r.slot);
      ++good;
      continue;
    }
    if (s.resident() && failure.empty()) failure = reader_->failure(r.all);
    reader_->set_state(r.all, SlotState::kEmpty);
    s.give_up(r.slot);
  }
  if (!failure.empty()) throw std::runtime_error(failure);
  return good;
}

void HostStore::put(int layer, int expert, const uint8_t* row) {
  const SlotLayout& layout = layouts_[checked(layer, expert)];
  const std::string name = "put: layer " + std::to_string(layers_[layer].index) + ", expert " + std::to_string(expert);
  if (!layers_[layer].path.empty()) throw std::runtime_error(name + ": its rows are read from " + layers_[layer].path);
  Shelf& s = shelf(layer);
  const int32_t slot = first_row_[layer] + expert;   // such a class is resident
  {
    std::lock_guard<std::mutex> lock(lock_);
    if (s.busy(slot)) throw std::runtime_error(name + ": another thread is putting it");
    s.claim(slot, slot);
  }
  std::atomic_thread_fence(std::memory_order_seq_cst);   // a row put again: its location is 0 before its bytes change
  uint8_t* to = s.memory(slot);
  for (const Piece& p : layout.pieces) std::memcpy(to + p.slot_offset, row + p.row_offset, static_cast<size_t>(p.bytes));
  const std::string bad = options_.verify ? verify_slice(layout.geometry, layout.slice, layout.view(to)) : std::string();
  std::lock_guard<std::mutex> lock(lock_);
  if (!bad.empty()) {
    s.give_up(slot);
    add(counters_->checksum_failures);
    throw std::runtime_error(name + ": checksum of " + bad + " does not match");
  }
  reader_->set_state(s.slot_class().first_slot + slot, SlotState::kValid);
  s.publish(slot);
  add(counters_->rows_put);
}

const uint8_t* HostStore::row_address(int layer, int expert) const {
  const Shelf& s = shelves_[class_of_[checked(layer, expert)]];
  const uint32_t place = static_cast<uint32_t>(s.location()[first_row_[layer] + expert].load(std::memory_order_acquire));
  return place == 0 || place == kFailedLocation ? nullptr : s.memory(static_cast<int32_t>(place) - 1);
}

void HostStore::heat(uint32_t* out) {
  std::lock_guard<std::mutex> lock(lock_);
  for (size_t i = 0; i < layers_.size(); ++i)
    out = std::copy_n(shelf(static_cast<int>(i)).heat().begin() + first_row_[i], layers_[i].experts, out);
}

void HostStore::set_heat(const uint32_t* values) {
  std::lock_guard<std::mutex> lock(lock_);
  for (size_t i = 0; i < layers_.size(); ++i)
    for (int e = 0; e < layers_[i].experts; ++e)
      shelf(static_cast<int>(i)).heat()[first_row_[i] + e] = std::min(*values++, kHeatMax);
}

void prefault(uint8_t* address, int64_t bytes, int threads) {
  constexpr int64_t kStep = 32 << 20;
#ifndef MADV_POPULATE_WRITE
  constexpr int MADV_POPULATE_WRITE = 23;   // Linux 5.14
#endif
  std::atomic<int64_t> next{0};
  std::atomic<int> error{0};
  const auto work = [&] {
    for (int64_t at; (at = next.fetch_add(kStep)) < bytes;) {
      const int64_t n = std::min(kStep, bytes - at);
      if (madvise(address + at, static_cast<size_t>(n), MADV_POPULATE_WRITE) == 0) continue;
      if (errno != EINVAL) {
        error = errno;
        return;
      }
      for (int64_t p = 0; p < n; p += kPage) {   // an older kernel
        volatile uint8_t* byte = address + at + p;
        *byte = *byte;
      }
    }
  };
  std::vector<std::thread> others;
  for (int t = 1; t < threads; ++t) others.emplace_back(work);
  work();
  for (std::thread& t : others) t.join();
  if (error)
    throw std::runtime_error("arena: expected memory for " + std::to_string(bytes) + " bytes more, found: " +
                             std::strerror(error) + ". Lower the RAM budget");
}

}  // namespace moet
