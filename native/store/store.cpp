#include "store.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <stdexcept>

#include "verify.h"

namespace moet {

Store::Store(const std::vector<LayerSource>& layers, const PagerOptions& options)
    : layers_(layers),
      options_(options),
      class_of_(layers.size()),
      first_row_(layers.size()),
      counters_(options.counters_path),
      arena_([&] {
        if (options.world < 1 || options.rank < 0 || options.rank >= options.world)
          throw std::runtime_error("pager: expected 0 <= rank < world, found rank " + std::to_string(options.rank) +
                                   " of " + std::to_string(options.world));
        if (options.io_threads < 1 || options.chunk_bytes < kPage || options.chunk_bytes % kPage)
          throw std::runtime_error("pager: expected io_threads >= 1 and chunk_bytes a multiple of 4096, found " +
                                   std::to_string(options.io_threads) + " and " + std::to_string(options.chunk_bytes));
        for (size_t i = 0; i < layers.size(); ++i) {
          if (layers_[i].index < 0) layers_[i].index = static_cast<int32_t>(i);
          layouts_.emplace_back(layers[i].geometry, options.rank, options.world);
        }
        classes_ = make_classes(layers, layouts_, options.budget_bytes);
        return classes_.empty() ? 0 : classes_.back().offset + classes_.back().slots * classes_.back().slot_bytes;
      }()) {
  int32_t slots = 0;
  for (size_t c = 0; c < classes_.size(); ++c) {
    SlotClass& k = classes_[c];
    int32_t row = 0;
    for (const int layer : k.layers) {
      class_of_[layer] = static_cast<int>(c);
      first_row_[layer] = row;
      row += layers_[layer].experts;
    }
    const Policy policy = make_policy(k.slots, k.rows, options.staging_slots, options.hysteresis, options.age_every);
    books_.emplace_back(k.rows, policy);
    slots += k.slots;
    add(counters_->rows_total, static_cast<uint64_t>(k.rows));
    add(counters_->bytes_total, static_cast<uint64_t>(k.rows * k.slot_bytes));
    if (k.resident) {
      for (int32_t r = 0; r < k.rows; ++r) books_.back().pin(r, r);
      add(counters_->slots_pinned, static_cast<uint64_t>(k.rows));
    }
  }
  counted_evictions_.resize(classes_.size());
  counted_admitted_.resize(classes_.size());
  set(counters_->arena_bytes, static_cast<uint64_t>(arena_.bytes()));
  set(counters_->arena_slots, static_cast<uint64_t>(slots));
  reader_ = std::make_unique<Reader>(
      layers_, layouts_, slots,
      ReaderOptions{options.io_threads, options.direct_io != 0, options.verify != 0, options.chunk_bytes}, *counters_);
  for (size_t i = 0; i < layers_.size() && warning_.empty() && options.direct_io; ++i)
    if (const RowFile* f = reader_->file(static_cast<int>(i)); f && !f->direct())
      warning_ = "row file " + f->path() + ": O_DIRECT does not work here (" + f->why_buffered() +
                 "); reading through the page cache";
}

void Store::check_layer(int layer, const char* what) const {
  if (layer < 0 || layer >= static_cast<int>(layers_.size()))
    throw std::runtime_error(std::string(what) + ": expected a layer of 0.." + std::to_string(layers_.size()) +
                             " (exclusive), found " + std::to_string(layer));
}

void Store::check_expert(int layer, int expert) const {
  if (expert < 0 || expert >= layers_[layer].experts)
    throw std::runtime_error("layer " + std::to_string(layers_[layer].index) + ": expected an expert of 0.." +
                             std::to_string(layers_[layer].experts) + " (exclusive), found " + std::to_string(expert));
}

uint8_t* Store::memory(int32_t slot) const {
  size_t c = 0;
  while (slot >= classes_[c].first_slot + classes_[c].slots) ++c;
  return arena_.data() + classes_[c].offset + (slot - classes_[c].first_slot) * classes_[c].slot_bytes;
}

void Store::begin(int layer, const int32_t* experts, int count, bool scan) {
  check_layer(layer, "begin");
  if (in_flight_ >= 0)
    throw std::runtime_error("begin: layer " + std::to_string(layers_[in_flight_].index) +
                             " is still in flight; end() it first");
  rows_.clear();
  for (int i = 0; i < count; ++i) {
    check_expert(layer, experts[i]);
    if (i && experts[i] <= experts[i - 1])
      throw std::runtime_error("begin: expected distinct experts in ascending order, found " +
                               std::to_string(experts[i]) + " after " + std::to_string(experts[i - 1]));
    rows_.push_back(first_row_[layer] + experts[i]);
  }
  const SlotClass& k = classes_[class_of_[layer]];
  if (k.resident)
    for (int i = 0; i < count; ++i)
      if (reader_->state(k.first_slot + rows_[i]) != SlotState::kValid)
        throw std::runtime_error("layer " + std::to_string(layers_[layer].index) + ", expert " +
                                 std::to_string(experts[i]) + ": expected a row by put(), found none");
  in_flight_ = layer;
  entries_.clear();
  uint64_t hits = 0;
  int waves = 0;
  for (const Step& step : books_[class_of_[layer]].begin(rows_, scan)) {
    const int32_t slot = k.first_slot + step.slot;
    Entry e{step.row - first_row_[layer], slot, step.after, step.wave, step.hit, false, false, false};
    if (step.hit) {
      const SlotState state = reader_->state(slot);
      e.posted = state == SlotState::kValid || state == SlotState::kFilling;
      e.hit = e.posted;   // else a read that failed or never began: once more, into the slot the row already has
      if (state == SlotState::kFilling) reader_->hurry(slot);
    }
    hits += e.hit;
    waves = std::max(waves, e.wave);
    entries_.push_back(e);
  }
  add(counters_->hits, hits);
  add(counters_->misses, entries_.size() - hits);
  if (scan) add(counters_->scan_hits, hits), add(counters_->scan_misses, entries_.size() - hits);
  add(counters_->waves, static_cast<uint64_t>(waves));
  add(counters_->layers);
  count_evictions();
  post_due();
}

void Store::count_evictions() {
  for (size_t c = 0; c < books_.size(); ++c) {
    add(counters_->evictions, books_[c].evictions - counted_evictions_[c]);
    add(counters_->admitted, books_[c].admitted - counted_admitted_[c]);
    counted_evictions_[c] = books_[c].evictions;
    counted_admitted_[c] = books_[c].admitted;
  }
}

bool Store::post_due() {
  jobs_.clear();
  for (Entry& e : entries_) {
    if (e.posted || (e.after >= 0 && !entries_[e.after].done)) continue;
    if (e.after < 0) reader_->settle(e.slot);   // a preheated row of another owner may still be landing there
    e.posted = true;
    jobs_.push_back(job(in_flight_, e.expert, e.slot));
  }
  reader_->post(jobs_, false);
  return !jobs_.empty();
}

int Store::take(std::vector<ReadyRow>& rows) {
  if (in_flight_ < 0) throw std::runtime_error("take: no layer is in flight");
  bool open = false, pending = false;
  for (Entry& e : entries_) {
    e.done = e.given;
    open |= !e.given;
    pending |= !e.posted;
  }
  if (!open) return 0;
  if (pending) post_due();
  const SlotLayout& layout = layouts_[in_flight_];
  int given = 0;
  auto collect = [&] {
    for (Entry& e : entries_) {
      if (!e.posted || e.given) continue;
      const SlotState state = reader_->state(e.slot);
      if (state == SlotState::kFailed) return true;
      if (state != SlotState::kValid) continue;
      e.given = true;
      rows.push_back({e.expert, layout.view(memory(e.slot))});
      ++given;
    }
    return given > 0;
  };
  if (!collect()) {
    const auto start = std::chrono::steady_clock::now();
    reader_->wait(collect);
    const auto us =
        std::chrono::duration_cast<std::chrono::microseconds>(std::chrono::steady_clock::now() - start).count();
    add(counters_->wait_us, static_cast<uint64_t>(us));
  }
  if (given) return given;   // a failure behind it is met by the next call
  for (const Entry& e : entries_)
    if (e.posted && !e.given && reader_->state(e.slot) == SlotState::kFailed)
      throw std::runtime_error(reader_->failure(e.slot));
  throw std::logic_error("take: nothing readable and nothing failed");
}

void Store::end() {
  if (in_flight_ < 0) return;
  for (const Entry& e :
       entries_)   // after a throw: nothing of this layer may still be written when the next one is planned
    if (e.posted && !e.given) reader_->settle(e.slot);
  for (const Entry& e : entries_)   // a later wave that never began: the slot is the row's, its bytes are not
    if (!e.posted) reader_->set_state(e.slot, SlotState::kEmpty);
  in_flight_ = -1;
}

void Store::put(int layer, int expert, const uint8_t* row) {
  check_layer(layer, "put");
  check_expert(layer, expert);
  const SlotClass& k = classes_[class_of_[layer]];
  if (!k.resident)
    throw std::runtime_error("put: layer " + std::to_string(layers_[layer].index) + " reads its rows from " +
                             layers_[layer].path);
  const SlotLayout& layout = layouts_[layer];
  const int32_t slot = k.first_slot + first_row_[layer] + expert;
  uint8_t* to = memory(slot);
  for (const Piece& p : layout.pieces)
    std::memcpy(to + p.slot_offset, row + p.row_offset, static_cast<size_t>(p.bytes));
  if (options_.verify)
    if (const std::string bad = verify_slice(layout.geometry, layout.slice, layout.view(to)); !bad.empty()) {
      add(counters_->checksum_failures);
      throw std::runtime_error("put: layer " + std::to_string(layers_[layer].index) + ", expert " +
                               std::to_string(expert) + ": checksum of " + bad + " does not match");
    }
  reader_->set_state(slot, SlotState::kValid);
  add(counters_->rows_put);
}

int64_t Store::preheat(int64_t limit, bool wait) {
  struct Row { uint32_t heat; int layer, expert; };
  std::vector<Row> wanted;
  for (size_t i = 0; i < layers_.size(); ++i) {
    const SlotClass& k = classes_[class_of_[i]];
    Bookkeeping& book = books_[class_of_[i]];
    for (int e = 0; e < layers_[i].experts && !k.resident; ++e)
      if (const int32_t row = first_row_[i] + e; book.slot_of(row) < 0 && (book.heat()[row] > 0 || k.slots >= k.rows))
        wanted.push_back({book.heat()[row], static_cast<int>(i), e});
  }
  std::stable_sort(wanted.begin(), wanted.end(), [](const Row& a, const Row& b) { return a.heat > b.heat; });
  std::vector<ReadJob> jobs;
  for (const Row& w : wanted) {
    if (static_cast<int64_t>(jobs.size()) >= limit) break;
    const int32_t slot = books_[class_of_[w.layer]].fill(first_row_[w.layer] + w.expert);
    if (slot >= 0) jobs.push_back(job(w.layer, w.expert, classes_[class_of_[w.layer]].first_slot + slot));
  }
  // In file order: neighbours in a file become neighbours in the queue.
  std::sort(jobs.begin(), jobs.end(), [](const ReadJob& a, const ReadJob& b) {
    return a.layer != b.layer ? a.layer < b.layer : a.expert < b.expert;
  });
  reader_->post(jobs, true);
  if (wait)
    reader_->wait([&] {
      return std::none_of(jobs.begin(), jobs.end(),
                          [&](const ReadJob& j) { return reader_->state(j.slot) == SlotState::kFilling; });
    });
  return static_cast<int64_t>(jobs.size());
}

void Store::heat(uint32_t* out) const {
  for (size_t i = 0; i < layers_.size(); ++i) {
    const auto& all = const_cast<Bookkeeping&>(books_[class_of_[i]]).heat();
    out = std::copy_n(all.begin() + first_row_[i], layers_[i].experts, out);
  }
}

void Store::set_heat(const uint32_t* values) {
  for (size_t i = 0; i < layers_.size(); ++i)
    for (int e = 0; e < layers_[i].experts; ++e)
      books_[class_of_[i]].heat()[first_row_[i] + e] = std::min(*values++, kHeatMax);
  for (Bookkeeping& b : books_) b.heat_changed();
}

std::vector<Store::PlanRow> Store::plan() const {
  std::vector<PlanRow> out;
  for (const Entry& e : entries_) out.push_back({e.expert, e.slot, e.wave, e.after, e.hit});
  return out;
}

int32_t Store::slot_of(int layer, int expert) const {
  const int32_t local = books_[class_of_[layer]].slot_of(first_row_[layer] + expert);
  return local < 0 ? -1 : local + classes_[class_of_[layer]].first_slot;
}

std::unique_ptr<Pager> make_pager(const std::vector<LayerSource>& layers, const PagerOptions& options) {
  return std::make_unique<Store>(layers, options);
}

}  // namespace moet
