// The I/O threads: read rows from files into arena slots, check them, and only then say that they are there.
#pragma once
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "arena.h"
#include "counters.h"
#include "row_file.h"

namespace moet {

enum class SlotState : uint8_t { kEmpty, kFilling, kValid, kFailed };   // of the row that owns the slot

struct ReadJob {
  int32_t slot = -1;        // among all slots
  int32_t layer = -1, expert = -1;
  uint8_t* to = nullptr;    // the slot's memory
};

struct ReaderOptions {
  int threads = 8;
  bool direct = true, verify = true;
  int64_t chunk_bytes = 1 << 20;
};

class Reader {
 public:
  Reader(const std::vector<LayerSource>& layers, const std::vector<SlotLayout>& layouts, int32_t slots,
         const ReaderOptions& options, Counters& counters);
  ~Reader();   // waits for the preads that run; rows still queued are dropped
  Reader(const Reader&) = delete;
  Reader& operator=(const Reader&) = delete;

  // Queues rows under one lock; their slots are kFilling from here on, and must not be kFilling before. `background`:
  // after all others.
  void post(const std::vector<ReadJob>& jobs, bool background);
  // Moves a row that waits in the background queue before the others there.
  void hurry(int32_t slot);
  // Takes back a row that no thread has begun (its slot is kEmpty then), or waits until it has landed or failed.
  void settle(int32_t slot);
  // Waits until ready() says so; it is asked again after each row that lands or fails.
  template <typename Ready>
  void wait(Ready ready) {
    std::unique_lock<std::mutex> lock(mutex_);
    landed_.wait(lock, ready);
  }

  SlotState state(int32_t slot) const { return state_[slot].load(std::memory_order_acquire); }
  void set_state(int32_t slot, SlotState state);   // of a slot that no thread is reading into
  std::string failure(int32_t slot);               // why it is kFailed
  void inject(int32_t layer, int32_t expert, int32_t kind, int64_t value, int64_t times);   // for tests; see Fault
  const RowFile* file(int layer) const { return files_[layer].get(); }

 private:
  struct Part { int64_t slot_offset, bytes; uint16_t chunks; };   // what has a checksum; chunks that hold its bytes
  struct Chunk { int64_t row_offset, bytes, slot_offset; int first_part, parts; };
  struct Check { uint16_t open; uint32_t crc; };                  // of a part: chunks that have not landed, then its CRC
  struct Work {
    ReadJob job;
    int next = 0, open = 0, chunks = 0;   // chunk to take next, chunks not finished, all
    std::vector<Check> checks;            // while the row is read
    bool background = false;
    std::string error;
    std::chrono::steady_clock::time_point began;
  };

  void plan(int layer);
  void run();
  bool read_chunk(const ReadJob& job, const Chunk& chunk, std::string& error);
  void check_parts(std::unique_lock<std::mutex>& lock, Work& work, const Chunk& chunk);
  void finish(std::unique_lock<std::mutex>& lock, Work& work);
  std::string name(const ReadJob& job) const;
  std::shared_ptr<Fault> fault_of(const ReadJob& job);

  const std::vector<LayerSource>& layers_;
  const std::vector<SlotLayout>& layouts_;
  const ReaderOptions options_;
  Counters& counters_;
  std::vector<std::vector<Chunk>> chunks_;            // of a layer's rows
  std::vector<std::vector<Part>> parts_;              // of a layer's rows: the slice's w13 tiles, w2 tiles, extras; empty: unchecked
  std::vector<std::shared_ptr<RowFile>> files_;       // of a layer; null: rows arrive by put()

  std::unique_ptr<std::atomic<SlotState>[]> state_;
  std::vector<Work> work_;                            // of a slot
  std::mutex mutex_;
  std::condition_variable posted_, landed_;
  std::deque<int32_t> queue_, background_;            // slots whose row has chunks that nobody took
  bool stop_ = false;

  std::atomic<bool> faults_armed_{false};
  std::map<std::pair<int32_t, int32_t>, std::shared_ptr<Fault>> faults_;
  std::mutex fault_mutex_;
  std::vector<std::thread> threads_;
};

}  // namespace moet
