// The C ABI of the store. A handle is a moet::Pager* that moet_pager_open made; store/native.py is its Python side.
#include <cstring>
#include <stdexcept>

#include "../include/api.h"
#include "abi.h"
#include "store.h"

namespace {

struct COptions {
  int64_t budget_bytes, chunk_bytes, age_every;
  const char* counters_path;   // null or "": private
  int32_t rank, world, io_threads, direct_io, verify, staging_slots, hysteresis, reserved;
};

moet::Store& store(void* handle) {
  if (!handle) throw std::runtime_error("pager: expected an open handle, found null. It was closed");
  return *static_cast<moet::Store*>(static_cast<moet::Pager*>(handle));
}

}  // namespace

MOET_API int moet_pager_open(const moet::CLayer* layers, int32_t count, const COptions* o, void** handle, char* err,
                             size_t err_len) {
  return moet::guarded(err, err_len, [&] {
    moet::PagerOptions options;
    options.rank = o->rank;
    options.world = o->world;
    options.budget_bytes = o->budget_bytes;
    options.io_threads = o->io_threads;
    options.direct_io = o->direct_io;
    options.verify = o->verify;
    options.chunk_bytes = o->chunk_bytes;
    options.counters_path = o->counters_path ? o->counters_path : "";
    options.staging_slots = o->staging_slots;
    options.hysteresis = o->hysteresis;
    options.age_every = o->age_every;
    *handle = moet::make_pager(moet::layer_sources(layers, count), options).release();
  });
}

MOET_API void moet_pager_close(void* handle) { delete static_cast<moet::Pager*>(handle); }

MOET_API int moet_pager_begin(void* handle, int32_t layer, const int32_t* experts, int32_t count, int32_t scan,
                              char* err, size_t err_len) {
  return moet::guarded(err, err_len, [&] { store(handle).begin(layer, experts, count, scan != 0); });
}

// experts[cap], views[3 * cap]; *given may be 0: the layer is complete.
MOET_API int moet_pager_take(void* handle, int32_t* experts, const uint8_t** views, int32_t cap, int32_t* given,
                             char* err, size_t err_len) {
  return moet::guarded(err, err_len, [&] {
    std::vector<moet::ReadyRow> rows;
    *given = store(handle).take(rows);
    if (*given > cap)
      throw std::runtime_error("take: expected room for " + std::to_string(*given) + " rows, found " +
                               std::to_string(cap));
    for (int32_t i = 0; i < *given; ++i) {
      experts[i] = rows[i].expert;
      views[3 * i] = rows[i].view.w13;
      views[3 * i + 1] = rows[i].view.w2;
      views[3 * i + 2] = rows[i].view.extras;
    }
  });
}

MOET_API int moet_pager_end(void* handle, char* err, size_t err_len) {
  return moet::guarded(err, err_len, [&] { store(handle).end(); });
}

// row: all row_bytes of the layer's geometry.
MOET_API int moet_pager_put(void* handle, int32_t layer, int32_t expert, const uint8_t* row, char* err,
                            size_t err_len) {
  return moet::guarded(err, err_len, [&] { store(handle).put(layer, expert, row); });
}

MOET_API int moet_pager_preheat(void* handle, int64_t limit, int32_t wait, int64_t* posted, char* err, size_t err_len) {
  return moet::guarded(err, err_len, [&] { *posted = store(handle).preheat(limit, wait != 0); });
}

// One uint32 a row, layers in the order of open.
MOET_API int moet_pager_heat_get(void* handle, uint32_t* out, char* err, size_t err_len) {
  return moet::guarded(err, err_len, [&] { store(handle).heat(out); });
}
MOET_API int moet_pager_heat_set(void* handle, const uint32_t* values, char* err, size_t err_len) {
  return moet::guarded(err, err_len, [&] { store(handle).set_heat(values); });
}

// The counters as they lie in memory (counters.h): at most `words` uint64.
MOET_API int moet_pager_counters(void* handle, uint64_t* out, int32_t words, char* err, size_t err_len) {
  return moet::guarded(err, err_len, [&] { moet::copy_counters(store(handle).counters(), out, words); });
}

// Why a file is read through the page cache although O_DIRECT was asked for; empty if none is.
MOET_API int moet_pager_warning(void* handle, char* text, size_t size, char* err, size_t err_len) {
  return moet::guarded(err, err_len, [&] { moet::copy_text(store(handle).warning(), text, size); });
}

// The slot classes: 5 int64 each: slot_bytes, rows, slots, first_slot, resident. *count: how many there are.
MOET_API int moet_pager_classes(void* handle, int64_t* out, int32_t cap, int32_t* count, char* err, size_t err_len) {
  return moet::guarded(err, err_len, [&] {
    const auto& classes = store(handle).classes();
    *count = static_cast<int32_t>(classes.size());
    for (int32_t i = 0; i < *count && i < cap; ++i) {
      const moet::SlotClass& c = classes[i];
      const int64_t values[5] = {c.slot_bytes, c.rows, c.slots, c.first_slot, c.resident};
      std::memcpy(out + 5 * i, values, sizeof(values));
    }
  });
}

// For tests: the plan of the layer in flight (or of the last one), 5 int32 a row: expert, slot, wave, after, hit.
MOET_API int moet_pager_plan(void* handle, int32_t* out, int32_t cap, int32_t* count, char* err, size_t err_len) {
  return moet::guarded(err, err_len, [&] {
    const auto plan = store(handle).plan();
    *count = static_cast<int32_t>(plan.size());
    for (int32_t i = 0; i < *count && i < cap; ++i) std::memcpy(out + 5 * i, &plan[i], 20);
  });
}

// For tests: the slot of a row (-1: none) and the state of that slot.
MOET_API int moet_pager_slot(void* handle, int32_t layer, int32_t expert, int32_t* slot, int32_t* state, char* err,
                             size_t err_len) {
  return moet::guarded(err, err_len, [&] {
    *slot = store(handle).slot_of(layer, expert);
    *state = *slot < 0 ? 0 : static_cast<int32_t>(store(handle).state(*slot));
  });
}

// For tests: the next `times` preads of a row go wrong (moet::Fault::Kind).
MOET_API int moet_pager_inject(void* handle, int32_t layer, int32_t expert, int32_t kind, int64_t value, int64_t times,
                               char* err, size_t err_len) {
  return moet::guarded(err, err_len, [&] { store(handle).inject(layer, expert, kind, value, times); });
}
