#include "pool.h"

#include <chrono>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace moet {
namespace {

// A layer's phases follow each other within microseconds, so a worker spins this long before it sleeps; waking it costs about 50 us.
constexpr auto kSpin = std::chrono::microseconds(30);

inline void pause() {
#if defined(__x86_64__)
  _mm_pause();
#endif
}

template <typename Ready>
bool spin(Ready ready) {
  const auto until = std::chrono::steady_clock::now() + kSpin;
  do {
    for (int i = 0; i < 32; ++i) {
      if (ready()) return true;
      pause();
    }
  } while (std::chrono::steady_clock::now() < until);
  return ready();
}

}  // namespace

FloatMode::FloatMode() {
#if defined(__x86_64__)
  saved_ = _mm_getcsr();
  _mm_setcsr(0x1f80);   // all exceptions masked, round to nearest, no flush to zero
#endif
}

FloatMode::~FloatMode() {
#if defined(__x86_64__)
  _mm_setcsr(saved_);
#endif
}

Pool::Pool(int threads) {
  for (int i = 1; i < threads; ++i) workers_.emplace_back([this] { work(); });
}

Pool::~Pool() {
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
    epoch_.fetch_add(1);
  }
  wake_.notify_all();
  for (std::thread& t : workers_) t.join();
}

void Pool::drain() {
  for (int64_t i; (i = next_.fetch_add(1, std::memory_order_relaxed)) < count_;) task_(i, context_);
}

void Pool::work() {
  FloatMode mode;
  uint64_t seen = 0;
  for (;;) {
    const auto changed = [&] { return epoch_.load(std::memory_order_acquire) != seen; };
    if (!spin(changed)) {
      std::unique_lock lock(mutex_);
      wake_.wait(lock, changed);
    }
    seen = epoch_.load(std::memory_order_acquire);
    if (stop_) return;
    drain();
    if (busy_.fetch_sub(1, std::memory_order_acq_rel) == 1) {
      std::lock_guard lock(mutex_);
      done_.notify_one();
    }
  }
}

void Pool::run(int64_t count, Task task, void* context) {
  if (workers_.empty() || count <= 1) {
    for (int64_t i = 0; i < count; ++i) task(i, context);
    return;
  }
  {
    std::lock_guard lock(mutex_);
    count_ = count;
    task_ = task;
    context_ = context;
    next_.store(0, std::memory_order_relaxed);
    busy_.store(int(workers_.size()), std::memory_order_relaxed);
    epoch_.fetch_add(1, std::memory_order_release);
  }
  wake_.notify_all();
  drain();
  const auto idle = [&] { return busy_.load(std::memory_order_acquire) == 0; };
  if (!spin(idle)) {
    std::unique_lock lock(mutex_);
    done_.wait(lock, idle);
  }
}

}  // namespace moet
