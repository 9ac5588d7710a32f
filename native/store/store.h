// The pager behind make_pager, with what moet.store needs beyond the interface that kernels use.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "arena.h"
#include "bookkeeping.h"
#include "counters.h"
#include "pager.h"
#include "reader.h"

namespace moet {

class Store final : public Pager {
 public:
  Store(const std::vector<LayerSource>& layers, const PagerOptions& options);

  void begin(int layer, const int32_t* experts, int count, bool scan) override;
  int take(std::vector<ReadyRow>& rows) override;
  void end() override;
  const RowGeometry& geometry(int layer) const override { return layers_[layer].geometry; }
  RowSlice slice(int layer) const override { return layouts_[layer].slice; }
  int rank() const override { return options_.rank; }

  // A whole row of a layer without a file. Threads may put different rows at the same time.
  void put(int layer, int expert, const uint8_t* row);
  // Reads up to `limit` of the hottest rows (heat above 0; every row of a class that has room for all) into free slots,
  // behind all other reads. Returns how many; with `wait`, after they landed. Failures are left to the request that
  // needs the row.
  int64_t preheat(int64_t limit, bool wait);
  // Heat of all rows, layers in order.
  void heat(uint32_t* out) const;
  void set_heat(const uint32_t* values);

  // For tests: the plan of the layer in flight, and what a slot is.
  struct PlanRow { int32_t expert, slot, wave, after, hit; };
  std::vector<PlanRow> plan() const;
  int32_t slot_of(int layer, int expert) const;      // among all slots; -1: none
  SlotState state(int32_t slot) const { return reader_->state(slot); }
  void inject(int layer, int expert, int kind, int64_t value, int64_t times) {
    reader_->inject(layer, expert, kind, value, times);
  }
  const Counters& counters() const { return *counters_; }
  const Arena& arena() const { return arena_; }
  const std::vector<SlotClass>& classes() const { return classes_; }
  const std::string& warning() const { return warning_; }

 private:
  struct Entry {             // a row of the layer in flight
    int32_t expert, slot, after, wave;
    bool hit, posted, given, done;
  };
  void check_layer(int layer, const char* what) const;
  void check_expert(int layer, int expert) const;
  uint8_t* memory(int32_t slot) const;
  ReadJob job(int layer, int expert, int32_t slot) const { return {slot, layer, expert, memory(slot)}; }
  bool post_due();           // reads whose slot has become free; true if any
  void count_evictions();

  std::vector<LayerSource> layers_;
  const PagerOptions options_;
  std::vector<SlotLayout> layouts_;
  std::vector<SlotClass> classes_;
  std::vector<int> class_of_;          // of a layer
  std::vector<int32_t> first_row_;     // of a layer, within its class
  std::vector<Bookkeeping> books_;     // of a class
  CounterBlock counters_;
  Arena arena_;
  std::string warning_;
  int in_flight_ = -1;                 // layer
  std::vector<Entry> entries_;
  std::vector<int32_t> rows_;
  std::vector<ReadJob> jobs_;
  std::vector<uint64_t> counted_evictions_, counted_admitted_;
  std::unique_ptr<Reader> reader_;     // last: its threads stop first
};

}  // namespace moet
