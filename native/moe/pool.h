// Threads that work on one list of tasks at a time. The caller works too, so a pool of 1 has no thread.
#pragma once
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace moet {

class Pool {
 public:
  explicit Pool(int threads);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int threads() const { return int(workers_.size()) + 1; }

  // Calls task(i, context) for i in [0, count), each once, in any order and on any thread; returns when all are done. The task must not throw.
  using Task = void (*)(int64_t, void*);
  void run(int64_t count, Task task, void* context);

  template <typename F>
  void run(int64_t count, F&& body) {
    run(count, [](int64_t i, void* f) { (*static_cast<std::remove_reference_t<F>*>(f))(i); }, &body);
  }

 private:
  void work();
  void drain();

  std::vector<std::thread> workers_;
  std::mutex mutex_;
  std::condition_variable wake_, done_;
  std::atomic<uint64_t> epoch_{0};      // one more for every list of tasks
  std::atomic<int> busy_{0};            // workers that have not finished this list
  std::atomic<bool> stop_{false};
  std::atomic<int64_t> next_{0};
  int64_t count_ = 0;
  Task task_ = nullptr;
  void* context_ = nullptr;
};

// Rounds to nearest and keeps subnormals while it lives, whatever the thread had: results must not depend on who calls.
class FloatMode {
 public:
  FloatMode();
  ~FloatMode();

 private:
  unsigned saved_ = 0;
};

}  // namespace moet
