// The arena: one mapping cut into slots, and how the rows of each layer lie in a slot.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "pager.h"

namespace moet {

inline constexpr int64_t kPage = 4096;   // alignment of O_DIRECT reads and of slots

struct Piece { int64_t row_offset, bytes, slot_offset; };   // a contiguous read: multiples of kPage

// A layer's rows as this rank keeps them: the slice's three segments, each widened to whole pages, neighbours merged
// into one read.
struct SlotLayout {
  RowGeometry geometry;
  RowSlice slice;
  std::vector<Piece> pieces;
  int64_t segment[3];      // where each segment of the slice starts in a slot
  int64_t slot_bytes;

  SlotLayout(const RowGeometry& geometry, int rank, int world);
  RowView view(const uint8_t* slot) const { return {slot + segment[0], slot + segment[1], slot + segment[2]}; }
};

// Layers whose slots have one size share their slots; put() layers keep theirs apart, since their rows never leave.
struct SlotClass {
  int64_t slot_bytes = 0;
  bool resident = false;   // rows arrive by put()
  int64_t rows = 0;
  int32_t slots = 0;
  int64_t offset = 0;      // of slot 0 in the arena
  int32_t first_slot = 0;  // its number among all slots
  std::vector<int> layers;
};

// Cuts the budget. Every class gets its minimum (all rows if resident, else kMinSlots), then a share in proportion to
// the bytes of its rows; what rounding leaves is given out slot by slot, most starved class first. Throws
// std::runtime_error with the minimum in bytes if it does not fit.
std::vector<SlotClass> make_classes(const std::vector<LayerSource>& layers, const std::vector<SlotLayout>& layouts,
                                    int64_t budget_bytes);

// One anonymous mapping, aligned to 2 MiB, transparent huge pages asked for, not inherited by fork (a child's
// copy-on-write would take pages away from under an O_DIRECT read).
class Arena {
 public:
  explicit Arena(int64_t bytes);   // throws std::runtime_error naming the size and errno
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;
  uint8_t* data() const { return data_; }
  int64_t bytes() const { return bytes_; }

 private:
  uint8_t* data_ = nullptr;
  int64_t bytes_ = 0;
};

}  // namespace moet
