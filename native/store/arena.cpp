#include "arena.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <map>
#include <stdexcept>
#include <sys/mman.h>

#include "bookkeeping.h"

namespace moet {

SlotLayout::SlotLayout(const RowGeometry& g, int rank, int world)
    : geometry(g), slice(slice_row(g, rank, world)), slot_bytes(0) {
  for (int i = 0; i < 3; ++i) {
    const int64_t begin = slice.offset[i] / kPage * kPage;
    const int64_t end = (slice.offset[i] + slice.length[i] + kPage - 1) / kPage * kPage;
    Piece* last = pieces.empty() ? nullptr : &pieces.back();
    if (last && begin <= last->row_offset + last->bytes) {
      const int64_t grown = std::max<int64_t>(end - last->row_offset, last->bytes);
      slot_bytes += grown - last->bytes;
      last->bytes = grown;
    } else {
      pieces.push_back({begin, end - begin, slot_bytes});
      slot_bytes += end - begin;
      last = &pieces.back();
    }
    segment[i] = pieces.back().slot_offset + slice.offset[i] - pieces.back().row_offset;
  }
}

std::vector<SlotClass> make_classes(const std::vector<LayerSource>& layers, const std::vector<SlotLayout>& layouts,
                                    int64_t budget) {
  std::map<std::pair<bool, int64_t>, SlotClass> by_size;
  for (size_t i = 0; i < layers.size(); ++i) {
    const bool resident = layers[i].path.empty();
    SlotClass& c = by_size[{!resident, layouts[i].slot_bytes}];
    c.slot_bytes = layouts[i].slot_bytes;
    c.resident = resident;
    c.rows += layers[i].experts;
    c.layers.push_back(static_cast<int>(i));
  }
  std::vector<SlotClass> classes;
  int64_t minimum = 0, all = 0;
  for (auto& [key, c] : by_size) {
    c.slots = static_cast<int32_t>(c.resident ? c.rows : std::min<int64_t>(c.rows, kMinSlots));
    minimum += c.slots * c.slot_bytes;
    all += c.rows * c.slot_bytes;
    classes.push_back(std::move(c));
  }
  if (budget == 0) budget = all;
  if (budget < minimum) {
    throw std::runtime_error(
        "arena budget: expected at least " + std::to_string(minimum) + " bytes (" + std::to_string(classes.size()) +
        " slot size(s); rows without a file must all fit, others need " + std::to_string(kMinSlots) +
        " slots), found " + std::to_string(budget) + ". Raise the RAM budget");
  }
  const double share = all > 0 ? std::min(1.0, static_cast<double>(budget) / static_cast<double>(all)) : 0;
  int64_t left = budget - minimum;
  for (SlotClass& c : classes) {
    const int64_t wanted =
        std::min<int64_t>(c.rows, static_cast<int64_t>(share * static_cast<double>(c.rows))) - c.slots;
    const int64_t more = std::clamp<int64_t>(wanted, 0, left / c.slot_bytes);
    c.slots += static_cast<int32_t>(more);
    left -= more * c.slot_bytes;
  }
  for (;;) {
    SlotClass* starved = nullptr;
    for (SlotClass& c : classes)
      if (c.slots < c.rows && c.slot_bytes <= left &&
          (!starved || double(c.slots) / c.rows < double(starved->slots) / starved->rows))
        starved = &c;
    if (!starved) break;
    ++starved->slots;
    left -= starved->slot_bytes;
  }
  int64_t offset = 0;
  int32_t first = 0;
  for (SlotClass& c : classes) {
    c.offset = offset;
    c.first_slot = first;
    offset += c.slots * c.slot_bytes;
    first += c.slots;
  }
  return classes;
}

Arena::Arena(int64_t bytes) : bytes_(bytes) {
  if (bytes == 0) return;
  constexpr int64_t kHuge = 2 << 20;
  const size_t reserved = static_cast<size_t>(bytes + kHuge);
  void* memory = mmap(nullptr, reserved, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED)
    throw std::runtime_error("arena: mapping " + std::to_string(bytes) + " bytes: " + std::strerror(errno) +
                             ". Lower the RAM budget");
  uint8_t* start = static_cast<uint8_t*>(memory);
  data_ = reinterpret_cast<uint8_t*>((reinterpret_cast<uintptr_t>(start) + kHuge - 1) / kHuge * kHuge);
  if (data_ > start) munmap(start, static_cast<size_t>(data_ - start));
  uint8_t* end = start + reserved;
  if (end > data_ + bytes)
    munmap(data_ + bytes, static_cast<size_t>(end - (data_ + bytes)));   // slots are whole pages, so bytes are
  madvise(data_, static_cast<size_t>(bytes), MADV_HUGEPAGE);
  madvise(data_, static_cast<size_t>(bytes), MADV_DONTFORK);
}

Arena::~Arena() {
  if (data_) munmap(data_, static_cast<size_t>(bytes_));
}

}  // namespace moet
