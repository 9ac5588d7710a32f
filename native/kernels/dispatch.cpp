// Which kernels run: the widest the machine has, unless a test or a benchmark forces one.
#include <atomic>
#include <stdexcept>
#include <string>

#include "../include/api.h"
#include "kernels.h"

namespace moet {
namespace {

const KernelTable* best() {
  if (const KernelTable* t = avx512_kernels()) return t;
  if (const KernelTable* t = avx2_kernels()) return t;
  return &portable_kernels();
}

std::atomic<const KernelTable*>& chosen() {
  static std::atomic<const KernelTable*> table{best()};
  return table;
}

}  // namespace

const KernelTable& kernels() { return *chosen().load(std::memory_order_relaxed); }

}  // namespace moet

// Name of the kernels that run: "avx512", "avx2" or "portable".
MOET_API const char* moet_isa() { return moet::kernels().name; }

// Forces kernels for the whole process; "auto" is the machine's best. For tests and benchmarks: the results have the same bits.
MOET_API int moet_set_isa(const char* name, char* err, size_t err_len) {
  return moet::guarded(err, err_len, [&] {
    const std::string want = name;
    const moet::KernelTable* table = nullptr;
    if (want == "auto") table = moet::best();
    else if (want == "portable") table = &moet::portable_kernels();
    else if (want == "avx2") table = moet::avx2_kernels();
    else if (want == "avx512") table = moet::avx512_kernels();
    else throw std::runtime_error("isa: expected auto, portable, avx2 or avx512, found '" + want + "'");
    if (!table) throw std::runtime_error("isa " + want + ": this machine does not have it; it has " + moet::best()->name);
    moet::chosen() = table;
  });
}
