// A file of rows: how it is opened (O_DIRECT where a probe read works) and how a range of it is read to the last byte.
#pragma once
#include <atomic>
#include <cstdint>
#include <string>

namespace moet {

// What a test makes go wrong. Every pread of a matching row passes through it.
struct Fault {
  enum Kind : int32_t { kErrno = 0, kShort = 1, kDelay = 2, kCorrupt = 3 };
  int32_t kind = kErrno;
  int64_t value =
      0;   // errno; largest pread in bytes; microseconds before each pread; offset in the piece whose byte is flipped
  std::atomic<int64_t> times{0};   // preads it applies to
};

struct ReadResult {
  int error = 0;           // errno; kEndOfFile
  int preads = 0, short_reads = 0;
};
inline constexpr int kEndOfFile = -1;

class RowFile {
 public:
  // Throws std::runtime_error naming the path if it does not open or is shorter than `end` bytes. `probe_offset`: a
  // page that can be read.
  RowFile(const std::string& path, bool direct, int64_t probe_offset, int64_t end);
  ~RowFile();
  RowFile(const RowFile&) = delete;
  RowFile& operator=(const RowFile&) = delete;

  // Reads [offset, offset + bytes), all three multiples of 4096, into `to`. Continues short reads and EINTR. `fault`:
  // may be null.
  ReadResult read(uint8_t* to, int64_t offset, int64_t bytes, Fault* fault) const;
  // Buffered files: lets the page cache go, so that rows are in memory once.
  void forget(int64_t offset, int64_t bytes) const;

  bool direct() const { return direct_; }
  const std::string& path() const { return path_; }
  const std::string& why_buffered() const { return why_buffered_; }

 private:
  std::string path_, why_buffered_;
  int fd_ = -1;
  bool direct_ = false;
};

}  // namespace moet
