#include "counters.h"

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fcntl.h>
#include <stdexcept>
#include <sys/mman.h>
#include <unistd.h>

#include "../include/api.h"

namespace moet {

CounterBlock::CounterBlock(const std::string& path) {
  int fd = -1;
  const std::string temporary = path + "." + std::to_string(getpid()) + ".tmp";
  auto fail = [&](const char* what) {
    const int error = errno;
    if (fd >= 0) close(fd);
    if (!path.empty()) unlink(temporary.c_str());
    throw std::runtime_error("counters file " + path + ": " + what + ": " + std::strerror(error) +
                             ". Expected a folder that can be written");
  };
  if (!path.empty()) {
    fd = open(temporary.c_str(), O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
    if (fd < 0) fail("open");
    // With its blocks: on a full memory file system a write to the mapping would be a SIGBUS.
    if ((errno = posix_fallocate(fd, 0, sizeof(Counters))) != 0) fail("posix_fallocate");
  }
  void* memory = mmap(nullptr, sizeof(Counters), PROT_READ | PROT_WRITE,
                      fd >= 0 ? MAP_SHARED : MAP_PRIVATE | MAP_ANONYMOUS, fd, 0);
  if (memory == MAP_FAILED) fail("mmap");
  counters_ = static_cast<Counters*>(memory);   // fresh pages are zero, and so is every counter
  set(counters_->words, sizeof(Counters) / 8 - 2);
  uint64_t magic;
  std::memcpy(&magic, "MOETCNT1", 8);
  counters_->magic.store(magic, std::memory_order_release);
  if (fd >= 0) {
    if (rename(temporary.c_str(), path.c_str()) != 0) {
      munmap(memory, sizeof(Counters));
      fail("rename");
    }
    close(fd);
  }
}

CounterBlock::~CounterBlock() { munmap(counters_, sizeof(Counters)); }

}  // namespace moet

// The names of the counters in their order, separated by spaces: the Python reader is tested against it.
MOET_API const char* moet_counter_names() {
#define X(name) #name " "
  return MOET_COUNTERS(X);
#undef X
}
