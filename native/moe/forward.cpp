// One MoE layer in one call: which experts, page them in, compute each on its tokens as it becomes readable, combine.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>

#include "../include/api.h"
#include "../kernels/kernels.h"
#include "../store/pager.h"
#include "experts.h"
#include "forward.h"

namespace moet {
namespace {

float from_bf16(uint16_t b) { const uint32_t u = uint32_t(b) << 16; float f; std::memcpy(&f, &u, 4); return f; }

uint16_t to_bf16(float f) {   // round to nearest, ties to even; NaN stays NaN
  uint32_t u;
  std::memcpy(&u, &f, 4);
  if ((u & 0x7fffffff) > 0x7f800000) return uint16_t(u >> 16 | 0x40);
  return uint16_t((u + 0x7fff + (u >> 16 & 1)) >> 16);
}

// Ends the layer on the pager also when a row failed.
struct LayerOnPager {
  Pager& pager;
  ~LayerOnPager() { pager.end(); }
};

}  // namespace

// The pairs (token, place) of a chunk, sorted by expert: pairs [first[e], first[e + 1]) of `token` and `slot` belong to experts[e].
void Forward::route(const Layer& layer, int begin, int count) {
  const int experts = layer.experts;
  starts_.assign(size_t(experts) + 1, 0);
  for (int64_t i = 0; i < int64_t(count) * layer.top_k; ++i) {
    const int32_t id = layer.ids[int64_t(begin) * layer.top_k + i];
    if (id >= experts)
      throw std::runtime_error("topk_ids: expected ids below " + std::to_string(experts) + " (negative: no expert), found " + std::to_string(id) +
                               " for token " + std::to_string(begin + i / layer.top_k));
    if (id >= 0) ++starts_[size_t(id) + 1];
  }
  distinct_.clear();
  for (int e = 0; e < experts; ++e) {
    if (starts_[size_t(e) + 1]) distinct_.push_back(e);
    starts_[size_t(e) + 1] += starts_[size_t(e)];
  }
  next_.assign(starts_.begin(), starts_.end() - 1);
  const size_t pairs = size_t(starts_.back());
  pointers_.resize(pairs);
  place_.assign(size_t(count) * layer.top_k, -1);
  for (int64_t i = 0; i < int64_t(count) * layer.top_k; ++i) {
    const int32_t id = layer.ids[int64_t(begin) * layer.top_k + i];
    if (id < 0) continue;
    const int64_t at = next_[size_t(id)]++;
    pointers_[size_t(at)] = x_.data() + (i / layer.top_k) * layer.hidden;
    place_[size_t(i)] = at;
  }
}

void Forward::load(const Layer& layer, int begin, int count) {
  const int64_t n = int64_t(count) * layer.hidden, from = int64_t(begin) * layer.hidden;
  x_.resize(size_t(n));
  if (layer.bf16) {
    const uint16_t* x = static_cast<const uint16_t*>(layer.x) + from;
    for (int64_t i = 0; i < n; ++i) x_[size_t(i)] = from_bf16(x[i]);
  } else {
    std::memcpy(x_.data(), static_cast<const float*>(layer.x) + from, size_t(n) * 4);
  }
}

// out[t] = sum over j ascending of weights[t][j] * (result of the expert at place j), in float32.
void Forward::combine(const Layer& layer, const MlpSettings& settings, int begin, int count) {
  const int hidden_padded = settings.geometry.hidden_padded(), hidden = layer.hidden;
  const int64_t stride = io_bytes(settings, 1);
  pool_.run(count, [&](int64_t t) {
    float sums[256];
    for (int from = 0; from < hidden; from += 256) {
      const int n = std::min(256, hidden - from);
      std::fill_n(sums, n, 0.0f);
      for (int j = 0; j < layer.top_k; ++j) {
        const int64_t at = place_[size_t(t * layer.top_k + j)];
        if (at < 0) continue;
        const float weight = layer.weights[(begin + t) * layer.top_k + j];
        // The results of an expert are [tokens][hidden_padded] from the start of its io buffer.
        const int64_t first = starts_[size_t(layer.ids[(begin + t) * layer.top_k + j])];
        const float* result = reinterpret_cast<const float*>(io_.data() + first * stride) + (at - first) * hidden_padded + from;
        for (int i = 0; i < n; ++i) sums[i] += weight * result[i];
      }
      const int64_t to = (begin + t) * hidden + from;
      if (layer.bf16) for (int i = 0; i < n; ++i) static_cast<uint16_t*>(layer.out)[to + i] = to_bf16(sums[i]);
      else std::memcpy(static_cast<float*>(layer.out) + to, sums, size_t(n) * 4);
    }
  });
}

void Forward::chunk(Pager& pager, const Layer& layer, const MlpSettings& settings, int begin, int count) {
  load(layer, begin, count);
  route(layer, begin, count);
  const int64_t stride = io_bytes(settings, 1), middle = middle_bytes(settings, 1), pairs = starts_.back();
  if (int64_t(io_.size()) < pairs * stride) io_.resize(size_t(pairs * stride));
  if (int64_t(middle_.size()) < pairs * middle) middle_.resize(size_t(pairs * middle));
  if (!distinct_.empty()) {
    pager.begin(layer.index, distinct_.data(), int(distinct_.size()), layer.scan);
    LayerOnPager end{pager};
    for (;;) {
      ready_.clear();
      if (!pager.take(ready_)) break;
      jobs_.clear();
      for (const ReadyRow& row : ready_) {
        const int64_t first = starts_[size_t(row.expert)], tokens = starts_[size_t(row.expert) + 1] - first;
        jobs_.push_back({row.view, int32_t(tokens), pointers_.data() + first, io_.data() + first * stride, middle_.data() + first * middle});
      }
      run_experts(pool_, settings, jobs_);
    }
  }
  combine(layer, settings, begin, count);
}

void Forward::run(Pager& pager, Layer layer, const Activation& activation, int acts, int64_t scratch_bytes) {
  FloatMode mode;
  MlpSettings settings;
  settings.geometry = pager.geometry(layer.index);
  const RowSlice slice = pager.slice(layer.index);
  settings.tile_begin = slice.tile_begin;
  settings.tiles = slice.tile_end - slice.tile_begin;
  settings.down_bias = settings.geometry.biased && pager.rank() == 0;
  settings.activation = activation;
  settings.acts = acts;
  layer.hidden = settings.geometry.hidden;
  const int64_t per_token = layer.top_k * io_bytes(settings, 1);
  const int most = int(std::max<int64_t>(1, scratch_bytes / std::max<int64_t>(1, per_token)));
  const int chunks = (layer.tokens + most - 1) / most;
  for (int c = 0; c < chunks; ++c) {   // equal chunks, none larger than `most`
    const int begin = int(int64_t(c) * layer.tokens / chunks), end = int(int64_t(c + 1) * layer.tokens / chunks);
    chunk(pager, layer, settings, begin, end - begin);
  }
}

}  // namespace moet

namespace {

struct CActivation {
  int32_t kind, limited;
  float limit, alpha;
};

struct CLayer {           // moe/native.py is its Python twin
  const void* x;          // [tokens][hidden]
  const float* weights;   // [tokens][top_k]
  const int32_t* ids;     // [tokens][top_k]
  void* out;              // [tokens][hidden]
  int64_t scratch_bytes;
  int32_t index, tokens, top_k, experts, bf16, scan, acts, reserved;
  CActivation activation;
};

void zero_out(const CLayer& c, int64_t hidden) { std::memset(c.out, 0, size_t(c.tokens) * size_t(hidden) * (c.bf16 ? 2 : 4)); }

}  // namespace

MOET_API int moet_moe_open(int32_t threads, void** handle, char* err, size_t err_len) {
  return moet::guarded(err, err_len, [&] {
    if (threads < 1 || threads > 1024) throw std::runtime_error("threads: expected 1 to 1024, found " + std::to_string(threads));
    *handle = new moet::Forward(threads);
  });
}

MOET_API void moet_moe_close(void* handle) { delete static_cast<moet::Forward*>(handle); }

// The layer's result. After an error `out` is zeros: a failed step must not leave NaN behind.
MOET_API int moet_forward(void* handle, void* pager_handle, const CLayer* c, char* err, size_t err_len) {
  moet::Pager* pager = static_cast<moet::Pager*>(pager_handle);
  const int failed = moet::guarded(err, err_len, [&] {
    if (c->acts < 0 || c->acts >= moet::kActsKinds) throw std::runtime_error("activations: expected 0 to 3, found " + std::to_string(c->acts));
    moet::Layer layer;
    layer.index = c->index;
    layer.tokens = c->tokens;
    layer.top_k = c->top_k;
    layer.experts = c->experts;
    layer.bf16 = c->bf16;
    layer.scan = c->scan;
    layer.x = c->x;
    layer.weights = c->weights;
    layer.ids = c->ids;
    layer.out = c->out;
    const CActivation& a = c->activation;
    static_cast<moet::Forward*>(handle)->run(*pager, layer, {a.kind, a.limited, a.limit, a.alpha}, c->acts, c->scratch_bytes);
  });
  if (failed) {
    char ignored[64];
    moet::guarded(ignored, sizeof ignored, [&] { zero_out(*c, pager->geometry(c->index).hidden); });
  }
  return failed;
}

// One expert from its row slice: x float32 [tokens][hidden] -> out float32 [tokens][hidden]. For tests and benchmarks.
MOET_API int moet_expert_mlp(void* handle, const int32_t* geometry, const uint8_t* const* segments, int32_t tile_begin, int32_t tiles, int32_t down_bias,
                             const CActivation* a, int32_t acts, const float* x, int32_t tokens, float* out, char* err, size_t err_len) {
  return moet::guarded(err, err_len, [&] {
    moet::FloatMode mode;
    moet::MlpSettings s;
    s.geometry = {geometry[0], geometry[1], geometry[2], geometry[3]};
    s.tile_begin = tile_begin;
    s.tiles = tiles;
    s.down_bias = s.geometry.biased && down_bias;
    s.activation = {a->kind, a->limited, a->limit, a->alpha};
    s.acts = acts;
    moet::Buffer io, middle;
    io.resize(size_t(moet::io_bytes(s, tokens)));
    middle.resize(size_t(moet::middle_bytes(s, tokens)));
    std::vector<const float*> rows;
    const int hidden = s.geometry.hidden, padded = s.geometry.hidden_padded();
    for (int t = 0; t < tokens; ++t) rows.push_back(x + int64_t(t) * hidden);
    const moet::ExpertJob job{{segments[0], segments[1], segments[2]}, tokens, rows.data(), io.data(), middle.data()};
    moet::run_experts(static_cast<moet::Forward*>(handle)->pool(), s, {job});
    for (int t = 0; t < tokens; ++t)
      std::memcpy(out + int64_t(t) * hidden, reinterpret_cast<const float*>(io.data()) + int64_t(t) * padded, size_t(hidden) * 4);
  });
}
