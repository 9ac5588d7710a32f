// Eight I/O threads, faults, waves and background reads, with every byte of every row compared. Run under
// ThreadSanitizer and AddressSanitizer by test_store_stress.py. Usage: store_stress FILE LAYERS EXPERTS HIDDEN INTER
// SLOTS ROUNDS SEED
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <random>
#include <set>

#include "../../native/store/store.h"

int main(int argc, char** argv) {
  if (argc != 9) return 2;
  const int layers = std::atoi(argv[2]), experts = std::atoi(argv[3]), slots = std::atoi(argv[6]),
            rounds = std::atoi(argv[7]);
  std::ifstream in(argv[1], std::ios::binary);
  const std::vector<char> bytes((std::istreambuf_iterator<char>(in)), {});
  std::mt19937 rng(std::atoi(argv[8]));
  const moet::RowGeometry g{moet::kSym2, std::atoi(argv[4]), std::atoi(argv[5]), 0};
  std::vector<moet::LayerSource> sources;
  for (int l = 0; l < layers; ++l) sources.push_back({argv[1], l * experts * g.row_bytes(), experts, g, l});
  moet::PagerOptions options;
  options.budget_bytes = slots * g.row_bytes();
  options.io_threads = 8;
  options.chunk_bytes = 4096;
  moet::Store store(sources, options);
  std::vector<uint32_t> heat(static_cast<size_t>(layers) * experts, 1);
  store.set_heat(heat.data());
  store.preheat(1 << 30, false);
  const moet::RowSlice s = store.slice(0);
  long checked = 0, failed = 0;
  for (int round = 0; round < rounds; ++round) {
    const int layer = static_cast<int>(rng() % layers);
    if (rng() % 8 == 0) {
      static const int64_t kinds[4][2] = {{moet::Fault::kErrno, EIO},
                                          {moet::Fault::kShort, 4096},
                                          {moet::Fault::kDelay, 300},
                                          {moet::Fault::kCorrupt, 9}};
      const auto& f = kinds[rng() % 4];
      store.inject(layer, static_cast<int>(rng() % experts), static_cast<int>(f[0]), f[1], 1 + rng() % 3);
    }
    std::set<int32_t> set;
    const int count = rng() % 5 == 0 ? experts : 1 + static_cast<int>(rng() % 6);
    while (static_cast<int>(set.size()) < count) set.insert(static_cast<int32_t>(rng() % experts));
    const std::vector<int32_t> wanted(set.begin(), set.end());
    store.begin(layer, wanted.data(), count, rng() % 3 == 0);
    try {
      std::vector<moet::ReadyRow> rows;
      while (store.take(rows)) {
        for (const moet::ReadyRow& r : rows) {
          const char* want = bytes.data() + (layer * experts + r.expert) * g.row_bytes();
          const uint8_t* parts[3] = {r.view.w13, r.view.w2, r.view.extras};
          for (int k = 0; k < 3; ++k) {
            if (std::memcmp(parts[k], want + s.offset[k], static_cast<size_t>(s.length[k])) != 0) {
              std::printf("round %d: layer %d, expert %d, part %d differs\n", round, layer, r.expert, k);
              return 1;
            }
          }
          ++checked;
        }
        rows.clear();
        if (rng() % 50 == 0) break;   // a layer given up half way
      }
    } catch (const std::runtime_error&) {
      ++failed;
    }
    store.end();
  }
  std::printf("checked %ld failed %ld waves %ld evictions %ld\n", checked, failed,
              static_cast<long>(store.counters().waves.load()), static_cast<long>(store.counters().evictions.load()));
  return 0;
}
