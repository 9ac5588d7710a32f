// The C ABI of the host store. A handle is a moet::HostStore* that moet_host_open made; store/native.py is its Python side.
#include <stdexcept>

#include "../include/api.h"
#include "abi.h"
#include "host_store.h"

namespace {

struct CHostOptions {
  int64_t ram_bytes, chunk_bytes;
  const char* counters_path;   // null or "": private
  int32_t rank, world, io_threads, direct_io, verify, reserved;
};

moet::HostStore& store(void* handle) {
  if (!handle) throw std::runtime_error("host store: expected an open handle, found null. It was closed");
  return *static_cast<moet::HostStore*>(handle);
}

int64_t address(const void* p) { return reinterpret_cast<int64_t>(p); }

}  // namespace

MOET_API int moet_host_open(const moet::CLayer* layers, int32_t count, const CHostOptions* o, void** handle, char* err,
                            size_t err_len) {
  return moet::guarded(err, err_len, [&] {
    moet::HostOptions options;
    options.rank = o->rank;
    options.world = o->world;
    options.ram_bytes = o->ram_bytes;
    options.io_threads = o->io_threads;
    options.direct_io = o->direct_io;
    options.verify = o->verify;
    options.chunk_bytes = o->chunk_bytes;
    options.counters_path = o->counters_path ? o->counters_path : "";
    *handle = new moet::HostStore(moet::layer_sources(layers, count), options);
  });
}

MOET_API void moet_host_close(void* handle) { delete static_cast<moet::HostStore*>(handle); }

// The slot classes, 6 int64 each: slot_bytes, rows, arena slots, resident, address of the arena, address of the location words.
MOET_API int moet_host_classes(void* handle, int64_t* out, int32_t cap, int32_t* count, char* err, size_t err_len) {
  return moet::guarded(err, err_len, [&] {
    const auto& shelves = store(handle).shelves();
    *count = static_cast<int32_t>(shelves.size());
    for (int32_t i = 0; i < *count && i < cap; ++i) {
      const moet::SlotClass& k = shelves[i].slot_class();
      const int64_t values[6] = {k.slot_bytes, k.rows, k.slots, shelves[i].resident(), address(shelves[i].memory(0)),
                                 address(shelves[i].location())};
      std::memcpy(out + 6 * i, values, sizeof(values));
    }
  });
}

// The class of a layer, the row of its expert 0 there, where the three segments of a row begin in a slot, slot bytes, the rank's
// tiles [begin, end): 8 int64.
MOET_API int moet_host_layout(void* handle, int32_t layer, int64_t* out, char* err, size_t err_len) {
  return moet::guarded(err, err_len, [&] {
    const moet::SlotLayout& l = store(handle).layout(layer);
    const auto [cls, row] = store(handle).place(layer);
    const int64_t values[8] = {cls, row, l.segment[0], l.segment[1], l.segment[2], l.slot_bytes, l.slice.tile_begin, l.slice.tile_end};
    std::memcpy(out, values, sizeof(values));
  });
}

// The mailbox (0: none is needed), and the memory that holds it and all location words: address, bytes. 3 int64.
MOET_API int moet_host_control(void* handle, int64_t* out, char* err, size_t err_len) {
  return moet::guarded(err, err_len, [&] {
    const moet::HostStore& s = store(handle);
    const int64_t values[3] = {address(s.mailbox()), address(s.control().data()), s.control().bytes()};
    std::memcpy(out, values, sizeof(values));
  });
}

MOET_API int moet_host_plan_fill(void* handle, int64_t* rows, char* err, size_t err_len) {
  return moet::guarded(err, err_len, [&] { *rows = store(handle).plan_fill(); });
}
MOET_API int moet_host_fill(void* handle, int64_t limit, int64_t* rows, char* err, size_t err_len) {
  return moet::guarded(err, err_len, [&] { *rows = store(handle).fill(limit); });
}

// row: all row_bytes of the layer's geometry.
MOET_API int moet_host_put(void* handle, int32_t layer, int32_t expert, const uint8_t* row, char* err, size_t err_len) {
  return moet::guarded(err, err_len, [&] { store(handle).put(layer, expert, row); });
}

MOET_API int moet_host_row(void* handle, int32_t layer, int32_t expert, int64_t* at, char* err, size_t err_len) {
  return moet::guarded(err, err_len, [&] { *at = address(store(handle).row_address(layer, expert)); });
}

// One uint32 a row, layers in the order of open.
MOET_API int moet_host_heat_get(void* handle, uint32_t* out, char* err, size_t err_len) {
  return moet::guarded(err, err_len, [&] { store(handle).heat(out); });
}
MOET_API int moet_host_heat_set(void* handle, const uint32_t* values, char* err, size_t err_len) {
  return moet::guarded(err, err_len, [&] { store(handle).set_heat(values); });
}

MOET_API int moet_host_counters(void* handle, uint64_t* out, int32_t words, char* err, size_t err_len) {
  return moet::guarded(err, err_len, [&] { moet::copy_counters(store(handle).counters(), out, words); });
}

MOET_API int moet_host_warning(void* handle, char* text, size_t size, char* err, size_t err_len) {
  return moet::guarded(err, err_len, [&] { moet::copy_text(store(handle).warning(), text, size); });
}

// Why the last request that failed did; empty if none has.
MOET_API int moet_host_failure(void* handle, char* text, size_t size, char* err, size_t err_len) {
  return moet::guarded(err, err_len, [&] { moet::copy_text(store(handle).failure(), text, size); });
}

MOET_API int moet_host_prefault(uint8_t* at, int64_t bytes, int32_t threads, char* err, size_t err_len) {
  return moet::guarded(err, err_len, [&] { moet::prefault(at, bytes, threads); });
}

// For tests: the next `times` preads of a row go wrong (moet::Fault::Kind); the server ends as if its thread had died.
MOET_API int moet_host_inject(void* handle, int32_t layer, int32_t expert, int32_t kind, int64_t value, int64_t times,
                              char* err, size_t err_len) {
  return moet::guarded(err, err_len, [&] { store(handle).inject(layer, expert, kind, value, times); });
}
MOET_API int moet_host_stop_server(void* handle, char* err, size_t err_len) {
  return moet::guarded(err, err_len, [&] { store(handle).stop_server(); });
}
