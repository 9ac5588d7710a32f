// Memory read bandwidth by the plainest code: every byte of a buffer is loaded once and XORed. The yardstick of the kernels.
#include <cstring>
#include <stdexcept>

#include "../include/api.h"
#include "forward.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace moet {
namespace {

constexpr int64_t kPiece = 1 << 18;   // bytes a task

#if defined(__x86_64__)
__attribute__((target("avx2"))) uint64_t read_avx2(const uint8_t* p, int64_t bytes) {
  __m256i a = _mm256_setzero_si256(), b = a, c = a, d = a;
  for (int64_t i = 0; i < bytes; i += 128) {
    a = _mm256_xor_si256(a, _mm256_load_si256(reinterpret_cast<const __m256i*>(p + i)));
    b = _mm256_xor_si256(b, _mm256_load_si256(reinterpret_cast<const __m256i*>(p + i + 32)));
    c = _mm256_xor_si256(c, _mm256_load_si256(reinterpret_cast<const __m256i*>(p + i + 64)));
    d = _mm256_xor_si256(d, _mm256_load_si256(reinterpret_cast<const __m256i*>(p + i + 96)));
  }
  a = _mm256_xor_si256(_mm256_xor_si256(a, b), _mm256_xor_si256(c, d));
  alignas(32) uint64_t w[4];
  _mm256_store_si256(reinterpret_cast<__m256i*>(w), a);
  return w[0] ^ w[1] ^ w[2] ^ w[3];
}
#endif

uint64_t read_plain(const uint8_t* p, int64_t bytes) {
  uint64_t x = 0;
  for (int64_t i = 0; i < bytes; i += 8) {
    uint64_t w;
    std::memcpy(&w, p + i, 8);
    x ^= w;
  }
  return x;
}

uint64_t read(const uint8_t* p, int64_t bytes) {
#if defined(__x86_64__)
  static const bool avx2 = __builtin_cpu_supports("avx2");
  if (avx2) return read_avx2(p, bytes);
#endif
  return read_plain(p, bytes);
}

}  // namespace
}  // namespace moet

// Reads `bytes` (a multiple of 128) from `data` (32-byte aligned) with the threads of `handle`; *folded is the XOR of its 64-bit words.
MOET_API int moet_stream_read(void* handle, const uint8_t* data, int64_t bytes, uint64_t* folded, char* err, size_t err_len) {
  return moet::guarded(err, err_len, [&] {
    if (bytes % 128 || reinterpret_cast<uintptr_t>(data) % 32) throw std::runtime_error("stream read: expected whole 128 bytes from a 32-byte boundary");
    std::atomic<uint64_t> sum{0};
    static_cast<moet::Forward*>(handle)->pool().run((bytes + moet::kPiece - 1) / moet::kPiece, [&](int64_t i) {
      const int64_t from = i * moet::kPiece;
      sum.fetch_xor(moet::read(data + from, std::min(moet::kPiece, bytes - from)));
    });
    *folded = sum;
  });
}
