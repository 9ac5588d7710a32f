#include "row_file.h"

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <fcntl.h>
#include <memory>
#include <stdexcept>
#include <sys/stat.h>
#include <unistd.h>

#include "arena.h"

namespace moet {
namespace {

// The kernel says whether it can read this file past the page cache only when asked to: opening succeeds on file
// systems whose reads then fail.
std::string probe(int fd, int64_t offset) {
  std::unique_ptr<void, decltype(&std::free)> page(std::aligned_alloc(kPage, kPage), &std::free);
  ssize_t n;
  do n = pread(fd, page.get(), kPage, offset); while (n < 0 && errno == EINTR);
  if (n == kPage) return {};
  return n < 0 ? std::strerror(errno) : "short probe read";
}

ssize_t faulty_pread(int fd, uint8_t* to, int64_t bytes, int64_t offset, Fault* fault) {
  if (!fault || fault->times.fetch_sub(1) <= 0) return pread(fd, to, static_cast<size_t>(bytes), offset);
  if (fault->kind == Fault::kErrno) {
    errno = static_cast<int>(fault->value);
    return -1;
  }
  if (fault->kind == Fault::kDelay) usleep(static_cast<useconds_t>(fault->value));
  ssize_t n = pread(fd, to, static_cast<size_t>(bytes), offset);
  if (fault->kind == Fault::kShort &&
      n > fault->value) {   // a device that stopped early: what it did not deliver is not there
    std::memset(to + fault->value, 0xee, static_cast<size_t>(n - fault->value));
    n = fault->value;
  }
  if (fault->kind == Fault::kCorrupt && n > fault->value) to[fault->value] ^= 0x10;
  return n;
}

}  // namespace

RowFile::RowFile(const std::string& path, bool direct, int64_t probe_offset, int64_t end) : path_(path) {
  auto fail = [&](const std::string& what) {
    if (fd_ >= 0) close(fd_);
    throw std::runtime_error("row file " + path + ": " + what);
  };
  if (direct) {
    fd_ = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_DIRECT);
    why_buffered_ = fd_ < 0 ? std::strerror(errno) : probe(fd_, probe_offset);
    direct_ = why_buffered_.empty();
  } else {
    why_buffered_ = "switched off";
  }
  if (!direct_) {
    if (fd_ >= 0) close(fd_);
    fd_ = open(path.c_str(), O_RDONLY | O_CLOEXEC);
    if (fd_ < 0) fail(std::string("expected a readable file, found: ") + std::strerror(errno));
    posix_fadvise(fd_, 0, 0, POSIX_FADV_RANDOM);   // no readahead into rows that nobody asked for
  }
  struct stat status;
  if (fstat(fd_, &status) != 0) fail(std::strerror(errno));
  if (status.st_size < end)
    fail("expected at least " + std::to_string(end) + " bytes, found " + std::to_string(status.st_size) +
         ". The file is cut off: verify the pack");
}

RowFile::~RowFile() {
  if (fd_ >= 0) close(fd_);
}

ReadResult RowFile::read(uint8_t* to, int64_t offset, int64_t bytes, Fault* fault) const {
  ReadResult result;
  int stuck = 0;
  while (bytes > 0) {
    ssize_t n = faulty_pread(fd_, to, bytes, offset, fault);
    ++result.preads;
    if (n < 0) {
      if (errno == EINTR) continue;
      result.error = errno;
      return result;
    }
    if (n == 0) {
      result.error = kEndOfFile;
      return result;
    }
    if (n < bytes) {
      ++result.short_reads;
      if (direct_) n -= n % kPage;   // the next direct read must be aligned again
      if (n == 0 && ++stuck > 16) {
        result.error = EIO;
        return result;
      }
    }
    to += n;
    offset += n;
    bytes -= n;
  }
  return result;
}

void RowFile::forget(int64_t offset, int64_t bytes) const {
  if (!direct_) posix_fadvise(fd_, offset, bytes, POSIX_FADV_DONTNEED);
}

}  // namespace moet
