// What the pager counts, in a block of memory that another process may map: little-endian uint64 words, no locks.
//
// Word 0: magic "MOETCNT1". Word 1: number of words that follow. Then one word a name, in the order below, then the
// latency histogram. store/counters.py reads it; a test compares its names with MOET_COUNTERS.
#pragma once
#include <atomic>
#include <cstdint>
#include <string>

namespace moet {

// hits + misses = rows asked for (distinct experts of a layer); scan_* is the part of them that scans asked for.
// waves: waves beyond the first of a layer. wait_us: time that take() spent blocked. rows_*, bytes_*: read from files,
// by way of reading. evictions: rows that lost their slot. admitted: rows that moved from staging to the working set.
// short_reads: preads that were continued.
#define MOET_COUNTERS(X)                                                                                           \
  X(hits)                                                                                                          \
  X(misses) X(scan_hits) X(scan_misses) X(evictions) X(admitted) X(waves) X(layers) X(wait_us) X(rows_direct)      \
      X(rows_buffered) X(bytes_direct) X(bytes_buffered) X(reads) X(short_reads) X(checksum_failures) X(io_errors) \
          X(rows_preheated) X(rows_put) X(arena_bytes) X(arena_slots) X(slots_valid) X(slots_pinned) X(rows_total) \
              X(bytes_total) X(files_direct) X(files_buffered) X(io_threads)

inline constexpr int kLatencyBuckets =
    32;   // bucket b: rows that landed within [2^b, 2^(b+1)) us of the first pread of the row; bucket 0 from 0

struct Counters {
  using Word = std::atomic<uint64_t>;
  Word magic, words;
#define X(name) Word name;
  MOET_COUNTERS(X)
#undef X
  Word latency[kLatencyBuckets];
};
static_assert(sizeof(Counters) % 8 == 0 && std::atomic<uint64_t>::is_always_lock_free);

inline void add(Counters::Word& word, uint64_t n = 1) { word.fetch_add(n, std::memory_order_relaxed); }
inline void set(Counters::Word& word, uint64_t n) { word.store(n, std::memory_order_relaxed); }

// Owns the block. With a path, the file appears complete (temporary name, then rename) and stays after the process is
// gone.
class CounterBlock {
 public:
  explicit CounterBlock(const std::string& path);   // throws std::runtime_error naming the path and errno
  ~CounterBlock();
  CounterBlock(const CounterBlock&) = delete;
  CounterBlock& operator=(const CounterBlock&) = delete;
  Counters* operator->() const { return counters_; }
  Counters& operator*() const { return *counters_; }

 private:
  Counters* counters_ = nullptr;
};

}  // namespace moet
