// Kernels for AVX-512 F and BW: 16 rows a vector.
#include "kernels.h"

#if defined(__x86_64__)
#include <immintrin.h>

#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"   // false alarms of GCC 12 inside avx512fintrin.h
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx2,fma")

namespace moet {
namespace avx512 {

struct Vec {
  static constexpr int W = 16;
  using F = __m512;
  using I = __m512i;

  static F zero() { return _mm512_setzero_ps(); }
  static F splat_float(float f) { return _mm512_set1_ps(f); }
  static I splat(uint32_t u) { return _mm512_set1_epi32(int(u)); }
  static F broadcast(const float* p) { return _mm512_set1_ps(*p); }
  static I broadcast_word(const uint8_t* p) { int32_t w; __builtin_memcpy(&w, p, 4); return _mm512_set1_epi32(w); }
  static I load_words(const uint8_t* p) { return _mm512_loadu_si512(p); }
  static I load_bytes(const uint8_t* p) { return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
  static F load(const float* p) { return _mm512_loadu_ps(p); }
  static void store(float* p, F f) { _mm512_storeu_ps(p, f); }
  static F cast(I a) { return _mm512_castsi512_ps(a); }
  static I srl(I a, int n) { return _mm512_srli_epi32(a, unsigned(n)); }
  static I sra(I a, int n) { return _mm512_srai_epi32(a, unsigned(n)); }
  static I sll(I a, int n) { return _mm512_slli_epi32(a, unsigned(n)); }
  static I and_(I a, I b) { return _mm512_and_si512(a, b); }
  static I add32(I a, I b) { return _mm512_add_epi32(a, b); }
  static I sub32(I a, I b) { return _mm512_sub_epi32(a, b); }
  static F mul(F a, F b) { return _mm512_mul_ps(a, b); }
  static F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
  static F to_float(I a) { return _mm512_cvtepi32_ps(a); }

  static F sym2(I a) { return _mm512_permutevar_ps(_mm512_broadcast_f32x4(_mm_setr_ps(-4, -1, 1, 4)), a); }   // low 2 bits select
  static F e2m1(I a) {                                                                                         // low 4 bits select
    return _mm512_permutexvar_ps(a, _mm512_setr_ps(0, .5f, 1, 1.5f, 2, 3, 4, 6, -0.f, -.5f, -1, -1.5f, -2, -3, -4, -6));
  }
  struct Tcq2 {   // a word vector of tcq2
    I word;
    Tcq2() = default;
    explicit Tcq2(I w) : word(w) {}
    F operator[](int code) const {   // low 4 bits select
      return _mm512_permutexvar_ps(sra(word, 2 * code), _mm512_setr_ps(3, 11, -3, -9, -5, -15, 7, 1, -1, -7, 15, 5, 9, 3, -11, -3));
    }
  };
  // Exponent and mantissa moved to float32's place, the exponent raised by 120: y = 2^(e-7) (1 + m/8). That is the value but where e is 0: there it
  // is 2y - 2^-6 = 2^-6 m/8, and there only is 2y - 2^-6 the smaller one. No float32 subnormal on the way: Intel needs 150 cycles for each.
  static F e4m3(I a) {
    const F y = cast(add32(and_(sll(a, 20), splat(0x07f00000u)), splat(120u << 23)));
    const F magnitude = _mm512_min_ps(y, fma(y, splat_float(2.0f), splat_float(-0x1p-6f)));
    return cast(_mm512_or_si512(_mm512_castps_si512(magnitude), and_(sll(a, 24), splat(0x80000000u))));
  }
  static F ue5m3(I a) { return cast(add32(sll(a, 20), splat(112u << 23))); }
  static F ue8m0(I a) { return cast(_mm512_max_epu32(sll(a, 23), splat(0x00400000u))); }   // 2^-127 is a float32 subnormal

  static I table16(char a, char b, char c, char d, char e, char f, char g, char h, char i, char j, char k, char l, char m, char n, char o, char p) {
    return _mm512_broadcast_i32x4(_mm_setr_epi8(a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p));
  }
  static I sym2_first(I n) { return _mm512_shuffle_epi8(table16(0, 3, 5, 8, 0, 3, 5, 8, 0, 3, 5, 8, 0, 3, 5, 8), n); }
  static I sym2_second(I n) { return _mm512_shuffle_epi8(table16(0, 0, 0, 0, 3, 3, 3, 3, 5, 5, 5, 5, 8, 8, 8, 8), n); }
  static I e2m1_bytes(I n) { return _mm512_shuffle_epi8(table16(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0), n); }
  static I tcq2_bytes(I n) { return _mm512_shuffle_epi8(table16(9, 13, 6, 3, 5, 0, 11, 8, 7, 4, 15, 10, 12, 9, 2, 6), n); }   // (level + 15) / 2
  static I multiply_bytes(I u, I q) { return _mm512_maddubs_epi16(u, q); }
  static I add16(I a, I b) { return _mm512_add_epi16(a, b); }
  static I sum_pairs(I a, int factor) { return _mm512_madd_epi16(a, _mm512_set1_epi16(short(factor))); }
};

#include "blocks.h"

}  // namespace avx512
}  // namespace moet
#pragma GCC pop_options

namespace moet {
const KernelTable* avx512_kernels() {
  static constexpr KernelTable table = avx512::make_table("avx512");
  const bool ok = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq");
  return ok ? &table : nullptr;
}
}  // namespace moet
#else
namespace moet {
const KernelTable* avx512_kernels() { return nullptr; }
}  // namespace moet
#endif
