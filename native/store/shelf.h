// The arena slots of one class as a GPU sees them: which row is in which slot, and the location words that say so to the device
// (src/moet/kernels/paging/state.cuh, "location"). docs/pager.md, "On a GPU: the mailbox".
//
// One thread at a time changes a shelf; the device reads the location words whenever it likes.
#pragma once
#include <atomic>
#include <cstdint>
#include <vector>

#include "arena.h"
#include "reader.h"

namespace moet {

using Location = std::atomic<uint64_t>;
static_assert(sizeof(Location) == 8 && Location::is_always_lock_free);
inline constexpr uint32_t kFailedLocation = 0xffffffffu;

class Shelf {
 public:
  // arena: of slot 0. location: one word a row, zero. The layers outlive the shelf.
  Shelf(const SlotClass& k, const std::vector<LayerSource>& layers, uint8_t* arena, Location* location);

  const SlotClass& slot_class() const { return class_; }
  bool resident() const { return class_.slots >= class_.rows; }   // row r is in slot r, or nowhere
  int64_t rows() const { return class_.rows; }
  int32_t slot_of(int32_t row) const { return slot_of_[row]; }    // -1: none. A slot being filled counts
  bool busy(int32_t slot) const { return busy_[slot]; }           // being filled
  uint8_t* memory(int32_t slot) const { return arena_ + slot * class_.slot_bytes; }
  Location* location() const { return location_; }
  bool readable(int32_t row) const;                               // its layer has a file
  ReadJob job(int32_t row, int32_t slot) const;

  // A slot for the row: its own on a resident shelf; else the first free one; else, if `evict`, the one whose row is coldest
  // (ties: lowest number), pinned and busy ones left out. -1: there is none now.
  int32_t choose(int32_t row, bool evict) const;
  // Gives the slot to the row. The row that was there is unpublished: a seq_cst fence belongs between this and the first byte
  // written. True if there was one.
  bool claim(int32_t row, int32_t slot);
  void publish(int32_t slot);        // the bytes have landed
  void give_up(int32_t slot);        // they have not: the slot is free again
  void publish_failure(int32_t row, uint32_t number) {
    location_[row].store(uint64_t{number} << 32 | kFailedLocation, std::memory_order_release);
  }
  void pin(int32_t slot) { ++pins_[slot]; }
  void unpin(int32_t slot) { --pins_[slot]; }

  void touch(int32_t row);           // the row was requested
  std::vector<uint32_t>& heat() { return heat_; }

 private:
  SlotClass class_;
  const std::vector<LayerSource>& layers_;
  uint8_t* arena_;
  Location* location_;
  std::vector<int32_t> first_row_;   // of class_.layers
  std::vector<int32_t> slot_of_, row_of_, pins_;
  std::vector<uint32_t> heat_, generation_;
  std::vector<char> busy_;
  int64_t touches_ = 0;
};

}  // namespace moet
