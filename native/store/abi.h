// What the C ABIs of the pager and of the host store share.
#pragma once
#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "counters.h"
#include "pager.h"

namespace moet {

struct CLayer {
  const char* path;      // null or "": rows arrive by put
  int64_t data_offset;
  int32_t experts, format, hidden, inter, biased, index;
};

inline std::vector<LayerSource> layer_sources(const CLayer* layers, int32_t count) {
  std::vector<LayerSource> sources;
  for (int32_t i = 0; i < count; ++i) {
    const CLayer& l = layers[i];
    sources.push_back({l.path ? l.path : "", l.data_offset, l.experts, {l.format, l.hidden, l.inter, l.biased}, l.index});
  }
  return sources;
}

inline void copy_text(const std::string& text, char* out, size_t size) {
  if (size == 0) return;
  const size_t n = std::min(text.size(), size - 1);
  std::memcpy(out, text.data(), n);
  out[n] = 0;
}

// The counters as they lie in memory: at most `words` uint64.
inline void copy_counters(const Counters& counters, uint64_t* out, int32_t words) {
  const Counters::Word* from = &counters.magic;
  for (int32_t i = 0; i < words && i < static_cast<int32_t>(sizeof(Counters) / 8); ++i)
    out[i] = from[i].load(std::memory_order_relaxed);
}

}  // namespace moet
