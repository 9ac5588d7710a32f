// The pager of one rank on a machine whose expert memory is RAM: makes the routed experts of a layer readable, whatever
// the arena held.
//
// One thread drives a pager (the model's thread); I/O threads only fill slots. A layer goes begin -> take* -> end.
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "../include/row.h"

namespace moet {

struct LayerSource {          // the rows of one MoE layer
  std::string path;           // file that holds them; empty: rows arrive by put() and never leave
  int64_t data_offset = 0;    // of row 0 in the file, a multiple of 4096
  int32_t experts = 0;
  RowGeometry geometry;
  int32_t index = -1;         // the model's number of the layer, for messages; -1: its position
};

struct PagerOptions {
  int32_t rank = 0, world = 1;
  int64_t budget_bytes = 0;   // of the mapped arena, all slots together; 0: room for all rows
  int32_t io_threads = 8;
  int32_t direct_io = 1;      // 1: O_DIRECT where a probe read works; 0: buffered
  int32_t verify = 1;         // check CRCs of every row that is read
  // A row is read in pieces of this size, so that a lone miss uses several threads; a multiple of 4096.
  int64_t chunk_bytes = 1 << 20;
  std::string counters_path;  // file that shares the counters (counters.h); empty: private memory
  int32_t staging_slots = -1; // of a slot class that cannot hold all rows; -1: from its size (bookkeeping.h)
  int32_t hysteresis = -1;    // heat by which a row must pass a resident one to replace it; -1: the default
  int64_t age_every = -1;     // touches between two halvings of all heat; -1: the default
};

struct ReadyRow {
  int32_t expert;
  RowView view;
};

class Pager {
 public:
  virtual ~Pager() = default;

  // Plans one layer (position in the list given to make_pager). `experts`: distinct, ascending. `scan`: rows of a
  // prefill, which never evict the decode working set. Posts the reads of the first wave.
  virtual void begin(int layer, const int32_t* experts, int count, bool scan) = 0;

  // Blocks until at least one planned row is readable; appends all that are (hits first) and returns how many. 0: the
  // layer is complete. Calling take() again says that the rows handed out before are no longer needed, so their staging
  // slots may be filled for the next wave. Throws std::runtime_error naming file, layer, expert and errno or checksum
  // when a row cannot be read; the layer is then over.
  virtual int take(std::vector<ReadyRow>& rows) = 0;

  // Unpins the layer. Also after a throw. The views handed out are void from here on.
  virtual void end() = 0;

  virtual const RowGeometry& geometry(int layer) const = 0;
  virtual RowSlice slice(int layer) const = 0;
  virtual int rank() const = 0;
};

// Implemented by native/store; the handle that moet.store passes around as a void* is static_cast<void*>(Pager*).
std::unique_ptr<Pager> make_pager(const std::vector<LayerSource>& layers, const PagerOptions& options);

}  // namespace moet
