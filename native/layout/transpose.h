// 8 rows x 8 words of 32 bits, transposed: the step between a matrix (words of a row adjacent) and a block (words of a column adjacent).
#pragma once
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace moet {

// out[w][r] = in[r][w]; in and out are 8 pointers to 32 bytes each.
struct Portable {
  static void transpose(const uint8_t* const in[8], uint8_t* const out[8]) {
    for (int w = 0; w < 8; ++w)
      for (int r = 0; r < 8; ++r) std::memcpy(out[w] + 4 * r, in[r] + 4 * w, 4);
  }
};

#if defined(__x86_64__)
struct Avx2 {
  __attribute__((target("avx2"))) static void transpose(const uint8_t* const in[8], uint8_t* const out[8]) {
    __m256i v[8], t[8];
    for (int r = 0; r < 8; ++r) v[r] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(in[r]));
    for (int i = 0; i < 4; ++i) {
      t[2 * i] = _mm256_unpacklo_epi32(v[2 * i], v[2 * i + 1]);      // words 0,1 | 4,5 of two rows
      t[2 * i + 1] = _mm256_unpackhi_epi32(v[2 * i], v[2 * i + 1]);  // words 2,3 | 6,7
    }
    for (int i = 0; i < 2; ++i)
      for (int j = 0; j < 2; ++j) {                                  // word 2j, 2j+1 (and +4) of four rows
        v[4 * i + 2 * j] = _mm256_unpacklo_epi64(t[4 * i + j], t[4 * i + 2 + j]);
        v[4 * i + 2 * j + 1] = _mm256_unpackhi_epi64(t[4 * i + j], t[4 * i + 2 + j]);
      }
    for (int w = 0; w < 4; ++w) {
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(out[w]), _mm256_permute2x128_si256(v[w], v[4 + w], 0x20));
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(out[4 + w]), _mm256_permute2x128_si256(v[w], v[4 + w], 0x31));
    }
  }
};
#endif

}  // namespace moet
