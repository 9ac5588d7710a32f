// State of the MoE forward that lives as long as the model: threads and scratch. One call at a time.
#pragma once
#include <cstdint>
#include <cstdlib>
#include <new>
#include <vector>

#include "../store/pager.h"
#include "experts.h"

namespace moet {

struct Layer {
  int index = 0;             // of the pager
  int tokens = 0, top_k = 0, experts = 0, hidden = 0;
  bool bf16 = false;         // x and out; else float32
  bool scan = false;         // a prefill: Pager::begin
  const void* x = nullptr;
  const float* weights = nullptr;
  const int32_t* ids = nullptr;   // negative: this place routes nowhere
  void* out = nullptr;
};

// Uninitialised bytes on a cache line boundary; grows only.
class Buffer {
 public:
  Buffer() = default;
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() { std::free(data_); }
  size_t size() const { return size_; }
  uint8_t* data() { return data_; }
  const uint8_t* data() const { return data_; }
  void resize(size_t size) {
    if (size <= size_) return;
    std::free(data_);
    size_ = 0;
    data_ = static_cast<uint8_t*>(std::aligned_alloc(64, (size + 63) / 64 * 64));
    if (!data_) throw std::bad_alloc();
    size_ = size;
  }

 private:
  uint8_t* data_ = nullptr;
  size_t size_ = 0;
};

class Forward {
 public:
  explicit Forward(int threads) : pool_(threads) {}
  Pool& pool() { return pool_; }

  // scratch_bytes bounds the per-(token, place) buffers: the tokens are cut into equal chunks that fit, each of which pages its experts once.
  void run(Pager& pager, Layer layer, const Activation& activation, int acts, int64_t scratch_bytes);

 private:
  void load(const Layer& layer, int begin, int count);
  void route(const Layer& layer, int begin, int count);
  void chunk(Pager& pager, const Layer& layer, const MlpSettings& settings, int begin, int count);
  void combine(const Layer& layer, const MlpSettings& settings, int begin, int count);

  Pool pool_;
  std::vector<float> x_;                       // the chunk's hidden states
  std::vector<int64_t> starts_, next_;         // [experts + 1]: pairs of (token, place) by expert
  std::vector<int64_t> place_;                 // [tokens * top_k] -> pair, or -1
  std::vector<const float*> pointers_;         // [pairs] -> hidden state
  std::vector<int32_t> distinct_;
  std::vector<ReadyRow> ready_;
  std::vector<ExpertJob> jobs_;
  Buffer io_, middle_;                         // [pairs]
};

}  // namespace moet
