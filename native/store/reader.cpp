#include "reader.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "../include/crc32c.h"
#include "../include/row_check.h"
#include "verify.h"

namespace moet {

Reader::Reader(const std::vector<LayerSource>& layers, const std::vector<SlotLayout>& layouts, int32_t slots,
               const ReaderOptions& options, Counters& counters)
    : layers_(layers),
      layouts_(layouts),
      options_(options),
      counters_(counters),
      chunks_(layers.size()),
      parts_(layers.size()),
      files_(layers.size()),
      state_(new std::atomic<SlotState>[static_cast<size_t>(slots)]),
      work_(static_cast<size_t>(slots)) {
  for (int32_t s = 0; s < slots; ++s) state_[s].store(SlotState::kEmpty, std::memory_order_relaxed);
  std::map<std::string, std::shared_ptr<RowFile>> open;
  for (size_t i = 0; i < layers.size(); ++i) {
    const LayerSource& layer = layers[i];
    if (layer.path.empty()) continue;
    if (layer.data_offset % kPage)
      throw std::runtime_error("row file " + layer.path +
                               ": expected rows to start at a multiple of 4096, found offset " +
                               std::to_string(layer.data_offset));
    const int64_t end = layer.data_offset + layer.experts * layer.geometry.row_bytes();
    auto& file = open[layer.path];
    if (!file) {
      file = std::make_shared<RowFile>(layer.path, options.direct, layer.data_offset, end);
      add(file->direct() ? counters.files_direct : counters.files_buffered);
    }
    files_[i] = file;
    plan(static_cast<int>(i));
  }
  if (open.empty()) return;
  set(counters.io_threads, static_cast<uint64_t>(options.threads));
  for (int t = 0; t < options.threads; ++t) threads_.emplace_back([this] { run(); });
}

void Reader::plan(int layer) {
  const SlotLayout& layout = layouts_[layer];
  const RowGeometry& g = layout.geometry;
  auto& parts = parts_[layer];
  if (options_.verify) {
    const int64_t tile_bytes[2] = {g.w13_tile_bytes(), g.w2_tile_bytes()};
    for (int k = 0; k < 2; ++k)
      for (int t = 0; t < layout.slice.tile_end - layout.slice.tile_begin; ++t)
        parts.push_back({layout.segment[k] + t * tile_bytes[k], tile_bytes[k], 0});
    parts.push_back({layout.segment[2], g.extras_bytes() - 4, 0});
  }
  for (const Piece& piece : layout.pieces)
    for (int64_t done = 0; done < piece.bytes; done += options_.chunk_bytes) {
      Chunk chunk{piece.row_offset + done, std::min(options_.chunk_bytes, piece.bytes - done), piece.slot_offset + done, 0, 0};
      for (size_t p = 0; p < parts.size(); ++p) {   // a slot holds them in this order, so a chunk's parts are neighbours
        if (parts[p].slot_offset >= chunk.slot_offset + chunk.bytes ||
            parts[p].slot_offset + parts[p].bytes <= chunk.slot_offset)
          continue;
        if (chunk.parts++ == 0) chunk.first_part = static_cast<int>(p);
        ++parts[p].chunks;
      }
      chunks_[layer].push_back(chunk);
    }
}

Reader::~Reader() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stop_ = true;
    queue_.clear();
    background_.clear();
  }
  posted_.notify_all();
  for (std::thread& t : threads_) t.join();
}

void Reader::post(const std::vector<ReadJob>& jobs, bool background) {
  if (jobs.empty()) return;
  size_t chunks = 0;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    for (const ReadJob& job : jobs) {
      Work& work = work_[job.slot];
      work.job = job;
      work.next = 0;
      work.chunks = work.open = static_cast<int>(chunks_[job.layer].size());
      chunks += chunks_[job.layer].size();
      work.background = background;
      work.error.clear();
      set_state(job.slot, SlotState::kFilling);
      (background ? background_ : queue_).push_back(job.slot);
    }
  }
  if (chunks >= threads_.size()) {
    posted_.notify_all();
  } else {
    for (; chunks > 0; --chunks) posted_.notify_one();   // a lone small row wakes one thread, not eight
  }
}

void Reader::hurry(int32_t slot) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = std::find(background_.begin(), background_.end(), slot);
  if (found == background_.end()) return;
  background_.erase(found);
  queue_.push_back(slot);
}

void Reader::settle(int32_t slot) {
  std::unique_lock<std::mutex> lock(mutex_);
  if (state(slot) != SlotState::kFilling) return;
  if (work_[slot].next == 0) {
    for (auto* queue : {&queue_, &background_})
      queue->erase(std::remove(queue->begin(), queue->end(), slot), queue->end());
    set_state(slot, SlotState::kEmpty);
    return;
  }
  landed_.wait(lock, [&] { return state(slot) != SlotState::kFilling; });
}

void Reader::set_state(int32_t slot, SlotState next) {
  const SlotState before = state_[slot].exchange(next, std::memory_order_acq_rel);
  if (before == SlotState::kValid && next != SlotState::kValid)
    counters_.slots_valid.fetch_sub(1, std::memory_order_relaxed);
  if (before != SlotState::kValid && next == SlotState::kValid) add(counters_.slots_valid);
}

std::string Reader::failure(int32_t slot) {
  std::lock_guard<std::mutex> lock(mutex_);
  return work_[slot].error;
}

void Reader::inject(int32_t layer, int32_t expert, int32_t kind, int64_t value, int64_t times) {
  auto fault = std::make_shared<Fault>();
  fault->kind = kind;
  fault->value = value;
  fault->times = times;
  std::lock_guard<std::mutex> lock(fault_mutex_);
  faults_[{layer, expert}] = std::move(fault);
  faults_armed_.store(true, std::memory_order_release);
}

std::shared_ptr<Fault> Reader::fault_of(const ReadJob& job) {
  if (!faults_armed_.load(std::memory_order_acquire)) return nullptr;
  std::lock_guard<std::mutex> lock(fault_mutex_);
  const auto found = faults_.find({job.layer, job.expert});
  return found == faults_.end() ? nullptr : found->second;
}

std::string Reader::name(const ReadJob& job) const {
  return "row file " + layers_[job.layer].path + ": layer " + std::to_string(layers_[job.layer].index) + ", expert " +
         std::to_string(job.expert);
}

void Reader::run() {
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    posted_.wait(lock, [&] { return stop_ || !queue_.empty() || !background_.empty(); });
    if (stop_) return;
    std::deque<int32_t>& queue = queue_.empty() ? background_ : queue_;
    Work& work = work_[queue.front()];
    const ReadJob job = work.job;
    const Chunk& chunk = chunks_[job.layer][work.next];
    if (work.next == 0) {
      work.began = std::chrono::steady_clock::now();
      for (const Part& part : parts_[job.layer]) work.checks.push_back({part.chunks, 0});
    }
    if (++work.next == work.chunks) queue.pop_front();
    lock.unlock();
    std::string error;
    const bool good = read_chunk(job, chunk, error);
    lock.lock();
    if (!good && work.error.empty()) {
      work.error = std::move(error);
      if (work.next < work.chunks) {   // the rest of the row is of no use
        work.open -= work.chunks - work.next;
        work.next = work.chunks;
        for (auto* q : {&queue_, &background_}) q->erase(std::remove(q->begin(), q->end(), job.slot), q->end());
      }
    }
    if (good) check_parts(lock, work, chunk);
    if (--work.open == 0) finish(lock, work);
  }
}

bool Reader::read_chunk(const ReadJob& job, const Chunk& chunk, std::string& error) {
  const RowFile& file = *files_[job.layer];
  const int64_t offset =
      layers_[job.layer].data_offset + job.expert * layouts_[job.layer].geometry.row_bytes() + chunk.row_offset;
  uint8_t* to = job.to + chunk.slot_offset;
  const ReadResult result = file.read(to, offset, chunk.bytes, fault_of(job).get());
  add(counters_.reads, static_cast<uint64_t>(result.preads));
  if (result.short_reads) add(counters_.short_reads, static_cast<uint64_t>(result.short_reads));
  if (result.error) {
    add(counters_.io_errors);
    error = name(job) + ": expected " + std::to_string(chunk.bytes) + " bytes at " + std::to_string(offset) +
            ", found: " +
            (result.error == kEndOfFile ? std::string("end of file")
                                        : "errno " + std::to_string(result.error) + ", " + std::strerror(result.error));
    return false;
  }
  add(file.direct() ? counters_.bytes_direct : counters_.bytes_buffered, static_cast<uint64_t>(chunk.bytes));
  return true;
}

// CRCs of the parts whose last bytes this chunk brought: by the thread that brought them, while others still read. One thread that
// checked a whole row at its end would take a tenth of the time in which an NVMe disk reads it.
void Reader::check_parts(std::unique_lock<std::mutex>& lock, Work& work, const Chunk& chunk) {
  std::vector<int> complete;
  for (int p = chunk.first_part; p < chunk.first_part + chunk.parts; ++p)
    if (--work.checks[p].open == 0) complete.push_back(p);
  if (complete.empty() || !work.error.empty()) return;
  lock.unlock();   // this chunk is not finished, so the row is not, and its checks stay where they are
  for (const int p : complete) {
    const Part& part = parts_[work.job.layer][p];
    work.checks[p].crc = crc32c(work.job.to + part.slot_offset, static_cast<size_t>(part.bytes));
  }
  lock.lock();
}

void Reader::finish(std::unique_lock<std::mutex>& lock, Work& work) {
  const ReadJob job = work.job;
  const SlotLayout& layout = layouts_[job.layer];
  const RowFile& file = *files_[job.layer];
  lock.unlock();   // the slot is still kFilling: nobody else looks at it, or at work
  const int64_t row = layers_[job.layer].data_offset + job.expert * layout.geometry.row_bytes();
  for (const Piece& piece : layout.pieces) file.forget(row + piece.row_offset, piece.bytes);
  std::vector<uint32_t> crcs;
  for (const Check& check : work.checks) crcs.push_back(check.crc);
  const RowSlice& slice = layout.slice;
  if (work.error.empty() && options_.verify &&
      !crcs_hold(layout.geometry, slice.tile_begin, slice.tile_end, layout.view(job.to).extras, crcs.data())) {
    const std::string bad = verify_slice(layout.geometry, layout.slice, layout.view(job.to));
    if (!bad.empty()) {
      add(counters_.checksum_failures);
      work.error = name(job) + ": checksum of " + bad + " does not match. Run `moet verify --repair` on the pack";
    }
  }
  std::vector<Check>().swap(work.checks);
  lock.lock();
  if (work.error.empty()) {
    add(file.direct() ? counters_.rows_direct : counters_.rows_buffered);
    if (work.background) add(counters_.rows_preheated);
    const auto us =
        std::chrono::duration_cast<std::chrono::microseconds>(std::chrono::steady_clock::now() - work.began).count();
    int bucket = 0;
    while (bucket + 1 < kLatencyBuckets && us >> (bucket + 1)) ++bucket;
    add(counters_.latency[bucket]);
  }
  set_state(job.slot, work.error.empty() ? SlotState::kValid : SlotState::kFailed);
  landed_.notify_all();
}

}  // namespace moet
