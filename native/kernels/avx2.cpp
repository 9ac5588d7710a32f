// Kernels for AVX2 and FMA: 8 rows a vector.
#include "kernels.h"

#if defined(__x86_64__)
#include <immintrin.h>

#pragma GCC push_options
#pragma GCC target("avx2,fma")

namespace moet {
namespace avx2 {

struct Vec {
  static constexpr int W = 8;
  using F = __m256;
  using I = __m256i;

  static F zero() { return _mm256_setzero_ps(); }
  static F splat_float(float f) { return _mm256_set1_ps(f); }
  static I splat(uint32_t u) { return _mm256_set1_epi32(int(u)); }
  static F broadcast(const float* p) { return _mm256_broadcast_ss(p); }
  static I broadcast_word(const uint8_t* p) { return _mm256_castps_si256(_mm256_broadcast_ss(reinterpret_cast<const float*>(p))); }
  static I load_words(const uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
  static I load_bytes(const uint8_t* p) { return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))); }
  static F load(const float* p) { return _mm256_loadu_ps(p); }
  static void store(float* p, F f) { _mm256_storeu_ps(p, f); }
  static F cast(I a) { return _mm256_castsi256_ps(a); }
  static I srl(I a, int n) { return _mm256_srli_epi32(a, n); }
  static I sra(I a, int n) { return _mm256_srai_epi32(a, n); }
  static I sll(I a, int n) { return _mm256_slli_epi32(a, n); }
  static I and_(I a, I b) { return _mm256_and_si256(a, b); }
  static I add32(I a, I b) { return _mm256_add_epi32(a, b); }
  static I sub32(I a, I b) { return _mm256_sub_epi32(a, b); }
  static F mul(F a, F b) { return _mm256_mul_ps(a, b); }
  static F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
  static F to_float(I a) { return _mm256_cvtepi32_ps(a); }

  static F sym2(I a) { return _mm256_permutevar_ps(_mm256_setr_ps(-4, -1, 1, 4, -4, -1, 1, 4), a); }   // low 2 bits select
  static F e2m1(I a) {                                                                                  // low 3 bits select
    const F magnitude = _mm256_permutevar8x32_ps(_mm256_setr_ps(0, .5f, 1, 1.5f, 2, 3, 4, 6), a);
    return _mm256_or_ps(magnitude, cast(and_(sll(a, 28), splat(0x80000000u))));
  }
  // A word vector of tcq2: byte b of levels[j] is the level of code 4b + j.
  struct Tcq2 {
    I levels[4];
    Tcq2() = default;
    explicit Tcq2(I word) { for (int j = 0; j < 4; ++j) levels[j] = tcq2_levels(and_(sra(word, 2 * j), splat(0x0f0f0f0fu))); }
    F operator[](int code) const { return to_float(_mm256_srai_epi32(code < 12 ? sll(levels[code % 4], 24 - 8 * (code / 4)) : levels[code % 4], 24)); }
  };
  // Exponent and mantissa moved to float32's place, the exponent raised by 120: y = 2^(e-7) (1 + m/8). That is the value but where e is 0: there it
  // is 2y - 2^-6 = 2^-6 m/8, and there only is 2y - 2^-6 the smaller one. No float32 subnormal on the way: Intel needs 150 cycles for each.
  static F e4m3(I a) {
    const F y = cast(add32(and_(sll(a, 20), splat(0x07f00000u)), splat(120u << 23)));
    const F magnitude = _mm256_min_ps(y, fma(y, splat_float(2.0f), splat_float(-0x1p-6f)));
    return _mm256_or_ps(magnitude, cast(and_(sll(a, 24), splat(0x80000000u))));
  }
  static F ue5m3(I a) { return cast(add32(sll(a, 20), splat(112u << 23))); }
  static F ue8m0(I a) { return cast(_mm256_max_epu32(sll(a, 23), splat(0x00400000u))); }   // 2^-127 is a float32 subnormal

  static I table16(char a, char b, char c, char d, char e, char f, char g, char h, char i, char j, char k, char l, char m, char n, char o, char p) {
    return _mm256_broadcastsi128_si256(_mm_setr_epi8(a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p));
  }
  static I sym2_first(I n) { return _mm256_shuffle_epi8(table16(0, 3, 5, 8, 0, 3, 5, 8, 0, 3, 5, 8, 0, 3, 5, 8), n); }
  static I sym2_second(I n) { return _mm256_shuffle_epi8(table16(0, 0, 0, 0, 3, 3, 3, 3, 5, 5, 5, 5, 8, 8, 8, 8), n); }
  static I e2m1_bytes(I n) { return _mm256_shuffle_epi8(table16(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0), n); }
  static I tcq2_levels(I n) { return _mm256_shuffle_epi8(table16(3, 11, -3, -9, -5, -15, 7, 1, -1, -7, 15, 5, 9, 3, -11, -3), n); }
  static I tcq2_bytes(I n) { return _mm256_shuffle_epi8(table16(9, 13, 6, 3, 5, 0, 11, 8, 7, 4, 15, 10, 12, 9, 2, 6), n); }   // (level + 15) / 2
  static I multiply_bytes(I u, I q) { return _mm256_maddubs_epi16(u, q); }
  static I add16(I a, I b) { return _mm256_add_epi16(a, b); }
  static I sum_pairs(I a, int factor) { return _mm256_madd_epi16(a, _mm256_set1_epi16(short(factor))); }
};

#include "blocks.h"

}  // namespace avx2
}  // namespace moet
#pragma GCC pop_options

namespace moet {
const KernelTable* avx2_kernels() {
  static constexpr KernelTable table = avx2::make_table("avx2");
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") ? &table : nullptr;
}
}  // namespace moet
#else
namespace moet {
const KernelTable* avx2_kernels() { return nullptr; }
}  // namespace moet
#endif
