// Which row is in which slot: the cache policy of one slot class, with no I/O, no clock and no thread in it.
// moet/cache/reference.py is the specification in plain Python; a test runs both on the same traces. docs/pager.md
// explains the rules.
#pragma once
#include <cstdint>
#include <functional>
#include <queue>
#include <vector>

namespace moet {

struct Policy {
  int32_t slots = 0;
  int32_t staging = 0;      // of the slots; 0 where every row has a slot
  uint32_t hysteresis = 0;
  int64_t age_every = 0;    // touches
};

inline constexpr uint32_t kHeatUnit =
    16;   // heat of one touch: leaves four halvings before a single touch is forgotten
inline constexpr uint32_t kHeatMax = 1u << 30;
inline constexpr uint32_t kDefaultHysteresis = kHeatUnit;
inline constexpr int64_t kAgeTouchesPerRow = 4;    // default age_every = this * rows of the class
inline constexpr int32_t kMinSlots =
    3;   // one for the working set, two in staging: one is read while the other is in use

inline int32_t default_staging(int32_t slots, int64_t rows) {
  if (slots >= rows) return 0;
  return slots < 16 ? 2 : slots > 64 ? 8 : slots / 8;
}

// -1 for the defaults. staging is cut so that both kinds of slot exist where not every row has one.
inline Policy make_policy(int32_t slots, int64_t rows, int32_t staging, int32_t hysteresis, int64_t age_every) {
  Policy p;
  p.slots = slots;
  p.staging = slots >= rows      ? 0
              : staging < 0      ? default_staging(slots, rows)
              : staging < 1      ? 1
              : staging >= slots ? slots - 1
                                 : staging;
  p.hysteresis = hysteresis < 0 ? kDefaultHysteresis : static_cast<uint32_t>(hysteresis);
  p.age_every = age_every < 1 ? kAgeTouchesPerRow * rows : age_every;
  return p;
}

struct Step {              // one row of the layer in flight, in the order in which rows are handed out
  int32_t row = -1;        // within the class
  int32_t slot = -1;       // within the class
  int32_t after = -1;      // the step that must be done with the slot before this row may be read into it; -1: none
  int32_t wave = 0;
  int32_t evicted = -1;    // row that lost this slot
  bool hit = false;        // the slot already belongs to the row
};

class Bookkeeping {
 public:
  Bookkeeping(int64_t rows, const Policy& policy);

  // Plans the rows (distinct) of one layer: hits in the order given, then misses in the order given. Valid until the
  // next call.
  const std::vector<Step>& begin(const std::vector<int32_t>& rows, bool scan);

  // Gives a free slot of the working set to a row that has none, and returns it; -1 if there is no free one.
  int32_t fill(int32_t row);
  // Gives the row that slot for good: it is never a victim. Only for classes whose rows all have a slot.
  void pin(int32_t row, int32_t slot);

  int32_t slots() const { return policy_.slots; }
  int32_t slot_of(int32_t row) const { return slot_of_[row]; }
  int32_t row_of(int32_t slot) const { return row_of_[slot]; }
  bool staged(int32_t slot) const { return links_[slot].staged; }
  int32_t free_slots() const { return static_cast<int32_t>(free_.size()); }
  std::vector<uint32_t>& heat() { return heat_; }
  void heat_changed() { rebuild_victims(); }   // after heat() was written to from outside

  uint64_t evictions = 0, admitted = 0;

 private:
  struct Link { int32_t prev = -1, next = -1; bool staged = false; };
  struct Victim {
    uint32_t heat;
    int32_t slot;
    uint32_t version;
    bool operator>(const Victim& o) const { return heat != o.heat ? heat > o.heat : slot > o.slot; }
  };

  void unlink(int32_t slot);
  void link_newest(int32_t slot);
  void link_oldest(int32_t slot);
  void assign(int32_t row, int32_t slot);
  void join_working_set(int32_t slot);
  void consider(int32_t row);   // admits a staged row if it is hotter than the coldest of the working set
  int32_t coldest();            // slot of the working set that the layer in flight does not use; -1: none
  void rebuild_victims();
  bool in_use(int32_t slot) const { return used_[slot] == epoch_; }

  Policy policy_;
  std::vector<int32_t> slot_of_, row_of_;
  std::vector<uint32_t> heat_;
  std::vector<Link> links_;                    // of the staging list, oldest first
  int32_t oldest_ = -1, newest_ = -1;
  std::priority_queue<int32_t, std::vector<int32_t>, std::greater<>> free_;
  // Victims by (heat, slot). Keys are lower bounds: heat only grows between two halvings, and a stale top is pushed
  // again with its present heat.
  std::priority_queue<Victim, std::vector<Victim>, std::greater<>> victims_;
  std::vector<Victim> aside_;
  std::vector<uint32_t> version_;              // of a slot in the working set; an entry with an older one is void
  std::vector<char> pinned_;
  std::vector<uint64_t> used_;
  std::vector<int32_t> last_step_;             // of a slot in the layer in flight
  uint64_t epoch_ = 0;
  int64_t touches_ = 0;
  std::vector<Step> steps_;
  std::vector<int32_t> misses_;
};

}  // namespace moet
