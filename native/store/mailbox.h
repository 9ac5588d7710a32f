// The CPU's side of the mailbox: a thread that reads what a GPU asks for into the arena. No Python and no CUDA call on this
// path. The bytes shared with the device are src/moet/kernels/paging/state.cuh's; docs/pager.md explains the protocol.
#pragma once
#include <atomic>
#include <cstdint>
#include <deque>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "counters.h"
#include "shelf.h"

namespace moet {

inline constexpr uint32_t kMailboxSize = 4096;

struct MailboxRequest {
  int32_t cls, row;                // device
  std::atomic<uint32_t> taken;     // device: 1 + the request's number once its row is no longer needed in the arena
  uint32_t reserved;
};
struct Mailbox {
  std::atomic<uint32_t> posted;    // device: requests ever posted, mod 2^32
  std::atomic<uint32_t> stop;      // host: the server ends
  uint32_t reserved[14];
  MailboxRequest request[kMailboxSize];
};
static_assert(sizeof(MailboxRequest) == 16 && sizeof(Mailbox) == 64 + 16 * kMailboxSize);

class MailboxServer {
 public:
  // Starts the thread. `lock` guards the shelves against whoever fills them from the host; the server holds it while rows are
  // chosen and published, not while they are read. All references outlive the server.
  MailboxServer(Mailbox& mailbox, std::vector<Shelf>& shelves, Reader& reader, std::mutex& lock, Counters& counters);
  ~MailboxServer() { stop(); }
  MailboxServer(const MailboxServer&) = delete;
  MailboxServer& operator=(const MailboxServer&) = delete;

  void stop();                     // what has not been served stays so; twice is fine. One thread only
  std::string failure();           // of the last request that failed; empty if none has

 private:
  struct Held { uint32_t number; int32_t cls, row, slot; };      // a slot kept until its request is taken; -1: its read failed
  struct Open { uint32_t number; int32_t cls, slot, row; };      // a read that runs
  struct Waiting { uint32_t number; int32_t row; };

  void run();
  bool idle();                     // no request, no read, none waiting
  bool serve();                    // true if anything happened
  bool accept();
  bool land();
  bool start();
  void release_taken();
  bool taken(uint32_t number) const;
  void hold(uint32_t number, int32_t cls, int32_t row, int32_t slot);
  void fail(uint32_t number, int32_t cls, int32_t row, const std::string& why);

  Mailbox& mailbox_;
  std::vector<Shelf>& shelves_;
  Reader& reader_;
  std::mutex& lock_;
  Counters& counters_;
  uint32_t next_ = 0;              // request to accept next
  std::vector<std::deque<Waiting>> waiting_;   // of a class, in the order of the requests
  std::vector<Held> held_;
  std::vector<Open> open_;
  std::vector<ReadJob> jobs_;
  std::string failure_;            // under lock_
  std::thread thread_;             // last: starts when all else is there
};

}  // namespace moet
