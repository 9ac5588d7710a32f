#include "mailbox.h"

#include <algorithm>
#include <chrono>
#include <sys/prctl.h>

namespace moet {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::microseconds;

// How long the server looks away when nothing happens. A decoding GPU asks again within a step, so it looks often for a while.
class Patience {
 public:
  void reset() { quiet_since_ = Clock::now(); }
  // `reading`: a read or a take is due, so the next event is near.
  void wait(bool reading) {
    const auto quiet = Clock::now() - quiet_since_;
    if (quiet < microseconds(50)) {
#if defined(__x86_64__)
      __builtin_ia32_pause();
#else
      std::this_thread::yield();
#endif
      return;
    }
    // A thousandth of the quiet time, from 20 us to 1 ms: between two steps the delay is lost in a read, and an idle server looks
    // 1,000 times a second.
    const auto thousandth = std::clamp<Clock::duration>(quiet / 1000, microseconds(20), microseconds(1000));
    std::this_thread::sleep_for(reading ? Clock::duration(microseconds(20)) : thousandth);
  }

 private:
  Clock::time_point quiet_since_ = Clock::now();
};

}  // namespace

MailboxServer::MailboxServer(Mailbox& mailbox, std::vector<Shelf>& shelves, Reader& reader, std::mutex& lock,
                             Counters& counters)
    : mailbox_(mailbox),
      shelves_(shelves),
      reader_(reader),
      lock_(lock),
      counters_(counters),
      waiting_(shelves.size()),
      thread_([this] { run(); }) {}

void MailboxServer::stop() {
  mailbox_.stop.store(1, std::memory_order_release);
  if (thread_.joinable()) thread_.join();
}

std::string MailboxServer::failure() {
  std::lock_guard<std::mutex> lock(lock_);
  return failure_;
}

void MailboxServer::run() {
  prctl(PR_SET_TIMERSLACK, 1000ul, 0ul, 0ul, 0ul);   // ns; the default of 50 us would make a sleep of 20 us one of 70
  Patience patience;
  while (!mailbox_.stop.load(std::memory_order_acquire)) {
    const bool quiet = idle();
    if (!quiet && serve())
      patience.reset();
    else
      patience.wait(!quiet);
  }
}

bool MailboxServer::idle() {
  return open_.empty() && mailbox_.posted.load(std::memory_order_acquire) == next_ &&
         std::all_of(waiting_.begin(), waiting_.end(), [](const auto& queue) { return queue.empty(); });
}

bool MailboxServer::serve() {
  std::lock_guard<std::mutex> lock(lock_);
  const bool accepted = accept(), landed = land(), started = start();
  return accepted || landed || started;
}

// The ring's entry belongs to another request once that was posted: the device does that only when it is done with this one.
bool MailboxServer::taken(uint32_t number) const {
  return mailbox_.request[number % kMailboxSize].taken.load(std::memory_order_acquire) == number + 1 ||
         mailbox_.posted.load(std::memory_order_acquire) - number > kMailboxSize;
}

// Before any victim is chosen. A failure that its request has not seen may have been overwritten, because another one asked for the
// row and got it: then it gets the row too.
void MailboxServer::release_taken() {
  const auto done = [&](const Held& h) {
    if (!taken(h.number)) return false;
    if (h.slot >= 0) shelves_[h.cls].unpin(h.slot);
    return true;
  };
  held_.erase(std::remove_if(held_.begin(), held_.end(), done), held_.end());
  for (Held& h : held_)
    if (h.slot < 0 && (h.slot = shelves_[h.cls].slot_of(h.row)) >= 0) shelves_[h.cls].pin(h.slot);
}

void MailboxServer::hold(uint32_t number, int32_t cls, int32_t row, int32_t slot) {
  shelves_[cls].pin(slot);
  held_.push_back({number, cls, row, slot});
  if (!shelves_[cls].busy(slot)) return;
  for (Open& o : open_)
    if (o.cls == cls && o.slot == slot) o.number = number;   // a failure is said to the newest who asks
}

// Rows that are there are kept before any victim is chosen: else a request could lose its row to the one before it.
bool MailboxServer::accept() {
  const uint32_t posted = mailbox_.posted.load(std::memory_order_acquire);
  if (posted == next_) return false;
  release_taken();
  if (posted - next_ > kMailboxSize) next_ = posted - kMailboxSize;   // a device that ran on after its time limit; those are overwritten
  for (; next_ != posted; ++next_) {
    const MailboxRequest& request = mailbox_.request[next_ % kMailboxSize];
    const int32_t cls = request.cls, row = request.row;
    if (cls < 0 || cls >= static_cast<int32_t>(shelves_.size()) || row < 0 || row >= shelves_[cls].rows()) {
      failure_ = "mailbox: request " + std::to_string(next_) + ": expected a row of a slot class, found row " +
                 std::to_string(row) + " of class " + std::to_string(cls) + ". The device's memory is damaged";
      continue;
    }
    if (taken(next_)) continue;   // the device gave it up, or found the row after all
    Shelf& shelf = shelves_[cls];
    shelf.touch(row);
    const int32_t slot = shelf.slot_of(row);
    add(slot >= 0 ? counters_.hits : counters_.misses);
    if (slot < 0) {
      waiting_[cls].push_back({next_, row});
      continue;
    }
    hold(next_, cls, row, slot);
  }
  return true;
}

bool MailboxServer::land() {
  bool any = false;
  for (size_t i = 0; i < open_.size();) {
    const Open o = open_[i];
    Shelf& shelf = shelves_[o.cls];
    const int32_t all = shelf.slot_class().first_slot + o.slot;   // the slot's number among all
    const SlotState state = reader_.state(all);
    if (state == SlotState::kFilling) {
      ++i;
      continue;
    }
    any = true;
    open_[i] = open_.back();
    open_.pop_back();
    if (state == SlotState::kValid) {
      shelf.publish(o.slot);
      continue;
    }
    const std::string why = reader_.failure(all);
    reader_.set_state(all, SlotState::kEmpty);
    for (Held& h : held_)
      if (h.cls == o.cls && h.slot == o.slot) {
        shelf.unpin(h.slot);
        h.slot = -1;
      }
    shelf.give_up(o.slot);
    fail(o.number, o.cls, o.row, why);
  }
  return any;
}

// First come, first served within a class, so that no request waits for a later one. Each waits at most for earlier rows to be
// taken, and those the device can take: they are published, or their reads run.
bool MailboxServer::start() {
  jobs_.clear();
  bool any = false, released = false;
  for (size_t c = 0; c < shelves_.size(); ++c) {
    Shelf& shelf = shelves_[c];
    for (auto& queue = waiting_[c]; !queue.empty(); queue.pop_front(), any = true) {
      const auto [number, row] = queue.front();
      if (taken(number)) continue;
      if (!shelf.readable(row)) {
        const ReadJob job = shelf.job(row, 0);
        fail(number, static_cast<int32_t>(c), row,
             "layer " + std::to_string(job.layer) + ", expert " + std::to_string(job.expert) +
                 ": expected a row by put(), found none");
        continue;
      }
      int32_t slot = shelf.slot_of(row);   // an earlier request of the queue may have brought it
      if (slot < 0) {
        if (!released) release_taken();
        released = true;
        slot = shelf.choose(row, true);
        if (slot < 0) break;
        if (shelf.claim(row, slot)) add(counters_.evictions);
        jobs_.push_back(shelf.job(row, slot));
        reader_.set_state(jobs_.back().slot, SlotState::kEmpty);   // its old bytes are no row any more
        open_.push_back({number, static_cast<int32_t>(c), slot, row});
      }
      hold(number, static_cast<int32_t>(c), row, slot);
    }
  }
  if (jobs_.empty()) return any;
  std::atomic_thread_fence(std::memory_order_seq_cst);   // locations are 0 for every processor before a byte changes
  reader_.post(jobs_, false);
  return true;
}

void MailboxServer::fail(uint32_t number, int32_t cls, int32_t row, const std::string& why) {
  failure_ = why;
  shelves_[cls].publish_failure(row, number);
}

}  // namespace moet
