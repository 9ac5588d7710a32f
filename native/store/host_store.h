// The expert store of a host that feeds a GPU: an arena in RAM that the device reads by itself, location words that say which row
// is where, and, where not every row has an arena slot, the mailbox's server. docs/pager.md, "On a GPU".
#pragma once
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "arena.h"
#include "counters.h"
#include "mailbox.h"
#include "reader.h"
#include "shelf.h"

namespace moet {

struct HostOptions {
  int32_t rank = 0, world = 1;
  int64_t ram_bytes = 0;           // of the arena; 0: room for all rows
  int32_t io_threads = 8;
  int32_t direct_io = 1, verify = 1;
  int64_t chunk_bytes = 1 << 20;   // as PagerOptions
  std::string counters_path;
};

class HostStore {
 public:
  // Maps memory, opens the files and starts the server, which waits until the device asks. Throws std::runtime_error.
  HostStore(const std::vector<LayerSource>& layers, const HostOptions& options);

  const std::vector<Shelf>& shelves() const { return shelves_; }   // of make_classes, in its order
  const SlotLayout& layout(int layer) const { return layouts_[checked(layer, 0)]; }
  std::pair<int, int32_t> place(int layer) const { return {class_of_[layer], first_row_[layer]}; }   // class, row of expert 0
  Mailbox* mailbox() const { return server_ ? mailbox_ : nullptr; }   // null: every row has an arena slot
  // What the device reads besides the arena: the mailbox and the location words.
  const Arena& control() const { return *control_; }

  // Chooses what to read ahead: all rows of classes that have room for all, else the hottest with heat above 0. Returns how many.
  int64_t plan_fill();
  // Reads the next `limit` of them, in file order, and publishes them; returns how many are in the arena now, -1 when none were
  // left. Requests wait meanwhile. Throws the error of a row that can not be read if no request may bring it later.
  int64_t fill(int64_t limit);
  // A whole row of a layer without a file. Threads may put different rows at the same time.
  void put(int layer, int expert, const uint8_t* row);
  const uint8_t* row_address(int layer, int expert) const;   // null: not in the arena

  // Heat by requests, layers in order.
  void heat(uint32_t* out);
  void set_heat(const uint32_t* values);

  void inject(int layer, int expert, int kind, int64_t value, int64_t times) {
    reader_->inject(checked(layer, expert), expert, kind, value, times);
  }
  void stop_server() { if (server_) server_->stop(); }
  std::string failure() { return server_ ? server_->failure() : std::string(); }
  const Counters& counters() const { return *counters_; }
  const std::string& warning() const { return warning_; }

 private:
  struct Wanted { int32_t cls, row; };
  int checked(int layer, int expert) const;   // the layer, if both exist
  Shelf& shelf(int layer) { return shelves_[class_of_[layer]]; }

  std::vector<LayerSource> layers_;
  const HostOptions options_;
  std::vector<SlotLayout> layouts_;
  std::vector<int> class_of_;          // of a layer
  std::vector<int32_t> first_row_;     // of a layer, within its class
  CounterBlock counters_;
  std::unique_ptr<Arena> arena_, control_;
  Mailbox* mailbox_ = nullptr;
  std::vector<Shelf> shelves_;
  std::string warning_;
  std::vector<Wanted> wanted_;         // what fill() has yet to read, last first
  std::mutex lock_;                    // of the shelves
  std::unique_ptr<Reader> reader_;
  std::unique_ptr<MailboxServer> server_;   // last: it stops first
};

// Makes the pages of [address, address + bytes) exist, by several threads: pinning pages that exist is fast. The bytes stay what
// they are. Throws std::runtime_error if the system has no memory for them.
void prefault(uint8_t* address, int64_t bytes, int threads);

}  // namespace moet
