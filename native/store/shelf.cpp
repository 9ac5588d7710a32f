#include "shelf.h"

#include <algorithm>

#include "bookkeeping.h"

namespace moet {

Shelf::Shelf(const SlotClass& k, const std::vector<LayerSource>& layers, uint8_t* arena, Location* location)
    : class_(k),
      layers_(layers),
      arena_(arena),
      location_(location),
      slot_of_(static_cast<size_t>(k.rows), -1),
      row_of_(static_cast<size_t>(k.slots), -1),
      pins_(static_cast<size_t>(k.slots)),
      heat_(static_cast<size_t>(k.rows)),
      generation_(static_cast<size_t>(k.slots)),
      busy_(static_cast<size_t>(k.slots)) {
  int32_t row = 0;
  for (const int layer : k.layers) {
    first_row_.push_back(row);
    row += layers[layer].experts;
  }
}

ReadJob Shelf::job(int32_t row, int32_t slot) const {
  const auto next = std::upper_bound(first_row_.begin(), first_row_.end(), row);
  const size_t i = static_cast<size_t>(next - first_row_.begin()) - 1;
  return {class_.first_slot + slot, class_.layers[i], row - first_row_[i], memory(slot)};
}

bool Shelf::readable(int32_t row) const { return !layers_[job(row, 0).layer].path.empty(); }

int32_t Shelf::choose(int32_t row, bool evict) const {
  if (resident()) return row;
  int32_t coldest = -1;
  for (int32_t s = 0; s < class_.slots; ++s) {
    if (busy_[s] || pins_[s]) continue;
    if (row_of_[s] < 0) return s;
    if (evict && (coldest < 0 || heat_[row_of_[s]] < heat_[row_of_[coldest]])) coldest = s;
  }
  return coldest;
}

bool Shelf::claim(int32_t row, int32_t slot) {
  const int32_t before = row_of_[slot];
  if (before >= 0) {
    location_[before].store(0, std::memory_order_relaxed);
    slot_of_[before] = -1;
  }
  row_of_[slot] = row;
  slot_of_[row] = slot;
  busy_[slot] = true;
  ++generation_[slot];
  return before >= 0;
}

void Shelf::publish(int32_t slot) {
  busy_[slot] = false;
  location_[row_of_[slot]].store(uint64_t{generation_[slot]} << 32 | static_cast<uint32_t>(slot + 1),
                                 std::memory_order_release);
}

void Shelf::give_up(int32_t slot) {
  busy_[slot] = false;
  slot_of_[row_of_[slot]] = -1;
  row_of_[slot] = -1;
}

void Shelf::touch(int32_t row) {
  if (heat_[row] < kHeatMax) heat_[row] += kHeatUnit;
  if (++touches_ < kAgeTouchesPerRow * class_.slots) return;
  touches_ = 0;   // as many requests as replace the arena four times: what nobody asked for since then is half as hot
  for (uint32_t& h : heat_) h >>= 1;
}

}  // namespace moet
