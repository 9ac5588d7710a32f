// The bookkeeping alone, without an arena: what tests compare with its specification and what policy measurements run
// on.
#include <cstring>
#include <stdexcept>

#include "../include/api.h"
#include "bookkeeping.h"

using moet::Bookkeeping;

// staging, hysteresis, age_every: -1 for the defaults.
MOET_API int moet_bookkeeping_open(int64_t rows, int32_t slots, int32_t staging, int32_t hysteresis, int64_t age_every,
                                   void** handle, char* err, size_t err_len) {
  return moet::guarded(err, err_len, [&] {
    *handle = new Bookkeeping(rows, moet::make_policy(slots, rows, staging, hysteresis, age_every));
  });
}

MOET_API void moet_bookkeeping_close(void* handle) { delete static_cast<Bookkeeping*>(handle); }

// steps: 6 int32 a row: row, slot, after, wave, evicted, hit. As many as rows.
MOET_API int moet_bookkeeping_begin(void* handle, const int32_t* rows, int32_t count, int32_t scan, int32_t* steps,
                                    char* err, size_t err_len) {
  return moet::guarded(err, err_len, [&] {
    for (const moet::Step& s : static_cast<Bookkeeping*>(handle)->begin({rows, rows + count}, scan != 0)) {
      const int32_t values[6] = {s.row, s.slot, s.after, s.wave, s.evicted, s.hit};
      std::memcpy(steps, values, sizeof(values));
      steps += 6;
    }
  });
}

MOET_API int moet_bookkeeping_fill(void* handle, int32_t row, int32_t* slot, char* err, size_t err_len) {
  return moet::guarded(err, err_len, [&] { *slot = static_cast<Bookkeeping*>(handle)->fill(row); });
}

// heat[rows], row_of[slots], staged[slots]; counts: evictions, admitted.
MOET_API int moet_bookkeeping_state(void* handle, uint32_t* heat, int32_t* row_of, uint8_t* staged, uint64_t* counts,
                                    char* err, size_t err_len) {
  return moet::guarded(err, err_len, [&] {
    auto& book = *static_cast<Bookkeeping*>(handle);
    std::memcpy(heat, book.heat().data(), 4 * book.heat().size());
    for (int32_t s = 0; s < book.slots(); ++s) {
      row_of[s] = book.row_of(s);
      staged[s] = book.staged(s);
    }
    counts[0] = book.evictions;
    counts[1] = book.admitted;
  });
}
