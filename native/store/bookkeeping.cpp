#include "bookkeeping.h"

#include <utility>

namespace moet {

Bookkeeping::Bookkeeping(int64_t rows, const Policy& policy)
    : policy_(policy),
      slot_of_(rows, -1),
      row_of_(policy.slots, -1),
      heat_(rows, 0),
      links_(policy.slots),
      version_(policy.slots, 0),
      pinned_(policy.slots, 0),
      used_(policy.slots, 0),
      last_step_(policy.slots, -1) {
  const int32_t working = policy.slots - policy.staging;
  for (int32_t s = 0; s < working; ++s) free_.push(s);
  for (int32_t s = working; s < policy.slots; ++s) link_newest(s);
}

void Bookkeeping::unlink(int32_t slot) {
  Link& l = links_[slot];
  (l.prev >= 0 ? links_[l.prev].next : oldest_) = l.next;
  (l.next >= 0 ? links_[l.next].prev : newest_) = l.prev;
  l = Link{};
}

void Bookkeeping::link_newest(int32_t slot) {
  links_[slot] = {newest_, -1, true};
  (newest_ >= 0 ? links_[newest_].next : oldest_) = slot;
  newest_ = slot;
}

void Bookkeeping::link_oldest(int32_t slot) {
  links_[slot] = {-1, oldest_, true};
  (oldest_ >= 0 ? links_[oldest_].prev : newest_) = slot;
  oldest_ = slot;
}

void Bookkeeping::assign(int32_t row, int32_t slot) {
  const int32_t before = row_of_[slot];
  if (before >= 0) {
    slot_of_[before] = -1;
    ++evictions;
  }
  row_of_[slot] = row;
  slot_of_[row] = slot;
}

void Bookkeeping::join_working_set(int32_t slot) { victims_.push({heat_[row_of_[slot]], slot, ++version_[slot]}); }

int32_t Bookkeeping::coldest() {
  int32_t found = -1;
  while (!victims_.empty() && found < 0) {
    Victim top = victims_.top();
    if (top.version != version_[top.slot] || links_[top.slot].staged) {
      victims_.pop();
    } else if (const uint32_t now = heat_[row_of_[top.slot]]; now != top.heat) {
      victims_.pop();
      top.heat = now;
      victims_.push(top);
    } else if (in_use(top.slot)) {
      victims_.pop();
      aside_.push_back(top);
    } else {
      found = top.slot;
    }
  }
  for (const Victim& v : aside_) victims_.push(v);
  aside_.clear();
  return found;
}

void Bookkeeping::rebuild_victims() {
  std::vector<Victim> all;
  for (int32_t s = 0; s < policy_.slots; ++s)
    if (row_of_[s] >= 0 && !links_[s].staged && !pinned_[s]) all.push_back({heat_[row_of_[s]], s, ++version_[s]});
  victims_ = decltype(victims_)(std::greater<>(), std::move(all));
}

void Bookkeeping::consider(int32_t row) {
  const int32_t slot = slot_of_[row], victim = coldest();
  if (victim < 0 || heat_[row] <= heat_[row_of_[victim]] + policy_.hysteresis) return;
  unlink(slot);
  join_working_set(slot);
  link_oldest(victim);   // its row stays readable until the next miss takes the slot
  ++admitted;
}

const std::vector<Step>& Bookkeeping::begin(const std::vector<int32_t>& rows, bool scan) {
  ++epoch_;
  steps_.clear();
  misses_.clear();
  if (!scan && (touches_ += static_cast<int64_t>(rows.size())) >= policy_.age_every) {
    touches_ = 0;
    for (uint32_t& h : heat_) h >>= 1;
    rebuild_victims();
  }
  for (const int32_t row : rows) {
    if (!scan && heat_[row] < kHeatMax) heat_[row] += kHeatUnit;
    const int32_t slot = slot_of_[row];
    if (slot < 0) {
      misses_.push_back(row);
      continue;
    }
    used_[slot] = epoch_;
    last_step_[slot] = static_cast<int32_t>(steps_.size());
    steps_.push_back({row, slot, -1, 0, -1, true});
  }
  const size_t hits = steps_.size();
  for (size_t i = 0; i < hits; ++i) {
    const int32_t slot = steps_[i].slot;
    if (!links_[slot].staged) continue;
    unlink(slot);
    link_newest(slot);
    if (!scan) consider(steps_[i].row);
  }
  for (const int32_t row : misses_) {
    Step step{row, -1, -1, 0, -1, false};
    if (const int32_t free = fill(row); free >= 0) {
      step.slot = free;
    } else {
      step.slot = oldest_;
      step.evicted = row_of_[step.slot];
      if (in_use(step.slot)) {
        step.after = last_step_[step.slot];
        step.wave = steps_[step.after].wave + 1;
      }
      unlink(step.slot);
      link_newest(step.slot);
      assign(row, step.slot);
    }
    used_[step.slot] = epoch_;
    last_step_[step.slot] = static_cast<int32_t>(steps_.size());
    steps_.push_back(step);
    if (!scan && links_[step.slot].staged) consider(row);
  }
  return steps_;
}

int32_t Bookkeeping::fill(int32_t row) {
  if (free_.empty()) return -1;
  const int32_t slot = free_.top();
  free_.pop();
  assign(row, slot);
  join_working_set(slot);
  return slot;
}

void Bookkeeping::pin(int32_t row, int32_t slot) {
  assign(row, slot);
  pinned_[slot] = 1;
}

}  // namespace moet
