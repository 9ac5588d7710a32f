// CRC-32C: the SSE4.2 instruction on three interleaved streams, or tables of 8 x 256 words; chosen at run time.
//
// The instruction has a latency of 3 cycles and a throughput of 1, so one stream runs at a third of its speed. The three results are joined by
// advancing a CRC over the length of the streams that follow it: multiplication by a power of x modulo the polynomial, linear in the CRC's bits, hence
// four table look-ups for a length known in advance.
#include "../include/crc32c.h"

#include <array>
#include <cstring>

#include "../include/api.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace moet {
namespace {

constexpr uint32_t kPolynomial = 0x82F63B78u;

// a * b modulo the polynomial; bit 31 is the coefficient of x^0.
constexpr uint32_t multiply(uint32_t a, uint32_t b) {
  uint32_t product = 0;
  for (uint32_t m = 1u << 31; m; m >>= 1) {
    if (a & m) product ^= b;
    b = b & 1 ? (b >> 1) ^ kPolynomial : b >> 1;
  }
  return product;
}

// x^(8 * bytes): the operator that advances a CRC over that many zero bytes.
constexpr uint32_t advance_operator(uint64_t bytes) {
  uint32_t result = 1u << 31, square = 1u << 23;  // x^0 and x^8
  for (; bytes; bytes >>= 1) {
    if (bytes & 1) result = multiply(square, result);
    square = multiply(square, square);
  }
  return result;
}

using ByteTables = std::array<std::array<uint32_t, 256>, 8>;

constexpr ByteTables make_byte_tables() {
  ByteTables t{};
  for (uint32_t i = 0; i < 256; ++i) {
    uint32_t c = i;
    for (int k = 0; k < 8; ++k) c = c & 1 ? (c >> 1) ^ kPolynomial : c >> 1;
    t[0][i] = c;
  }
  for (int j = 1; j < 8; ++j)
    for (int i = 0; i < 256; ++i) t[j][i] = (t[j - 1][i] >> 8) ^ t[0][t[j - 1][i] & 0xff];
  return t;
}
constexpr ByteTables kByte = make_byte_tables();

uint32_t update_portable(uint32_t c, const uint8_t* p, size_t n) {
  for (; n >= 8; p += 8, n -= 8) {
    uint64_t w;
    std::memcpy(&w, p, 8);
    w ^= c;
    c = 0;
    for (int j = 0; j < 8; ++j) c ^= kByte[7 - j][(w >> (8 * j)) & 0xff];
  }
  for (; n; --n) c = (c >> 8) ^ kByte[0][(c ^ *p++) & 0xff];
  return c;
}

#if defined(__x86_64__)
using AdvanceTables = std::array<std::array<uint32_t, 256>, 4>;

constexpr AdvanceTables make_advance_tables(uint64_t bytes) {
  AdvanceTables t{};
  const uint32_t op = advance_operator(bytes);
  for (int j = 0; j < 4; ++j)
    for (int bit = 0; bit < 8; ++bit) {  // linear: the table of a byte follows from its eight single bits
      const uint32_t value = multiply(op, 1u << (8 * j + bit));
      for (int i = 0; i < 1 << bit; ++i) t[j][i | 1 << bit] = t[j][i] ^ value;
    }
  return t;
}

inline uint32_t advance(const AdvanceTables& t, uint32_t c) {
  return t[0][c & 0xff] ^ t[1][c >> 8 & 0xff] ^ t[2][c >> 16 & 0xff] ^ t[3][c >> 24];
}

// 3 x 192 bytes is one sym2 block, the piece in which w2 tiles are summed; 3 x 2048 keeps the cost of joining under 1 %.
template <size_t kStream>
__attribute__((target("sse4.2"))) uint32_t update_streams(uint32_t crc, const uint8_t*& p, size_t& n) {
  static constexpr AdvanceTables kOne = make_advance_tables(kStream), kTwo = make_advance_tables(2 * kStream);
  while (n >= 3 * kStream) {
    uint64_t a = crc, b = 0, c = 0;
    for (size_t i = 0; i < kStream; i += 8) {
      uint64_t x, y, z;
      std::memcpy(&x, p + i, 8);
      std::memcpy(&y, p + kStream + i, 8);
      std::memcpy(&z, p + 2 * kStream + i, 8);
      a = _mm_crc32_u64(a, x);
      b = _mm_crc32_u64(b, y);
      c = _mm_crc32_u64(c, z);
    }
    crc = advance(kTwo, uint32_t(a)) ^ advance(kOne, uint32_t(b)) ^ uint32_t(c);
    p += 3 * kStream;
    n -= 3 * kStream;
  }
  return crc;
}

__attribute__((target("sse4.2"))) uint32_t update_sse42(uint32_t crc, const uint8_t* p, size_t n) {
  crc = update_streams<2048>(crc, p, n);
  crc = update_streams<192>(crc, p, n);
  uint64_t c = crc;
  for (; n >= 8; p += 8, n -= 8) {
    uint64_t w;
    std::memcpy(&w, p, 8);
    c = _mm_crc32_u64(c, w);
  }
  crc = uint32_t(c);
  for (; n; --n) crc = _mm_crc32_u8(crc, *p++);
  return crc;
}
#endif

using Update = uint32_t (*)(uint32_t, const uint8_t*, size_t);

Update choose() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("sse4.2")) return update_sse42;
#endif
  return update_portable;
}

}  // namespace

uint32_t crc32c(const void* data, size_t size, uint32_t seed) {
  static const Update update = choose();
  return ~update(~seed, static_cast<const uint8_t*>(data), size);
}

uint32_t crc32c_combine(uint32_t crc_a, uint32_t crc_b, uint64_t size_b) { return multiply(advance_operator(size_b), crc_a) ^ crc_b; }

}  // namespace moet

// CRC-32C of data[0, size) continued from `seed`. portable != 0: the table version, whatever the CPU (tests).
MOET_API uint32_t moet_crc32c(const void* data, size_t size, uint32_t seed, int32_t portable) {
  if (portable) return ~moet::update_portable(~seed, static_cast<const uint8_t*>(data), size);
  return moet::crc32c(data, size, seed);
}

MOET_API uint32_t moet_crc32c_combine(uint32_t crc_a, uint32_t crc_b, uint64_t size_b) { return moet::crc32c_combine(crc_a, crc_b, size_b); }
