// The trellis search for one ISA. Included once per ISA, inside its target; MOET_ISA is its namespace, MOET_LANES the floats of its vector.
//
// A lane is a row of the matrix. Four survivors, one for each value of the next code, each with what error feedback has left of the columns after it.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "trellis.h"

namespace moet {
namespace MOET_ISA {
namespace {

typedef float F __attribute__((vector_size(4 * MOET_LANES)));
typedef int32_t I __attribute__((vector_size(4 * MOET_LANES)));

inline F splat(float f) { return f - F{}; }
inline I splat_int(int32_t i) { return i - I{}; }
inline F select(I mask, F a, F b) { return mask ? a : b; }
inline I select(I mask, I a, I b) { return mask ? a : b; }

struct Survivor {
  F left[kTrellisColumns];    // the columns' targets, less what earlier errors move onto them
  F cost;                     // sum of error^2
  I word[2];                  // codes so far, the next one included
};

// Of four costs the least, and masks[a]: where it is cost a's; the first one where several are equal.
inline F least_of(const F cost[4], I masks[4]) {
  const I second = cost[1] < cost[0], fourth = cost[3] < cost[2];
  const F low = select(second, cost[1], cost[0]), high = select(fourth, cost[3], cost[2]);
  const I upper = high < low;
  masks[0] = ~upper & ~second, masks[1] = ~upper & second, masks[2] = upper & ~fourth, masks[3] = upper & fourth;
  return select(upper, high, low);
}

inline F pick(const I masks[4], F a, F b, F c, F d) { return select(masks[0] | masks[1], select(masks[0], a, b), select(masks[2], c, d)); }
inline I pick(const I masks[4], I a, I b, I c, I d) { return select(masks[0] | masks[1], select(masks[0], a, b), select(masks[2], c, d)); }

// Survivor `to` is the one of `from` that the masks name, and `error` of column k is fed back to the columns after it.
inline void follow(Survivor& to, const Survivor from[4], const I masks[4], F error, const TrellisBlock& b, int k) {
  for (int j = k + 1; j < b.columns; ++j)
    to.left[j] = pick(masks, from[0].left[j], from[1].left[j], from[2].left[j], from[3].left[j]) - error * b.feedback[k * kTrellisColumns + j];
  for (int w = 0; w < 2; ++w) to.word[w] = pick(masks, from[0].word[w], from[1].word[w], from[2].word[w], from[3].word[w]);
}

// Codes of MOET_LANES rows at the scales `scale`. Starts from, and works in, two sets of survivors; returns the best survivor.
inline const Survivor& search(const TrellisBlock& b, F scale, Survivor sets[2][4]) {
  for (int a = 0; a < 4; ++a) sets[0][a].cost = F{}, sets[0][a].word[0] = splat_int(a), sets[0][a].word[1] = I{};
  for (int k = 0;; ++k) {
    Survivor *from = sets[k % 2], *to = sets[(k + 1) % 2];
    const float inverse = 1 / b.feedback[k * kTrellisColumns + k];
    const int at = k % 16, w = k / 16;
    const bool last = k + 1 == b.columns;
    F cost[4], error[4];
    I masks[4];
    if (at == 15 || last) {
      // A word's last level depends on its own code alone: the arithmetic shift repeats the sign bit. A row's last code, within a word, is followed by 0.
      for (int a = 0; a < 4; ++a) {
        const int next = at == 15 && a & 2 ? 3 : 0;
        error[a] = (from[a].left[k] - scale * splat(kTrellisLevels[a + 4 * next])) * inverse;
        cost[a] = from[a].cost + error[a] * error[a];
      }
      const F best = least_of(cost, masks);
      follow(to[0], from, masks, pick(masks, error[0], error[1], error[2], error[3]), b, k);
      to[0].cost = best;
      if (last) return to[0];
      for (int a = 1; a < 4; ++a) to[a] = to[0];
      for (int a = 0; a < 4; ++a) to[a].word[w + 1] = splat_int(a);
      continue;
    }
    for (int n = 0; n < 4; ++n) {
      for (int a = 0; a < 4; ++a) {
        error[a] = (from[a].left[k] - scale * splat(kTrellisLevels[a + 4 * n])) * inverse;
        cost[a] = from[a].cost + error[a] * error[a];
      }
      to[n].cost = least_of(cost, masks);
      follow(to[n], from, masks, pick(masks, error[0], error[1], error[2], error[3]), b, k);
      to[n].word[w] |= splat_int(int32_t(uint32_t(n) << (2 * (at + 1))));
    }
  }
}

float scale_value(uint8_t byte, float multiplier) {
  const uint32_t bits = (uint32_t(byte) << 20) + (112u << 23);
  float f;
  std::memcpy(&f, &bits, 4);
  return f * multiplier;
}

// The byte whose value is nearest to x / multiplier.
int scale_byte(float x, float multiplier) {
  const float f = std::max(x / multiplier, 0x1p-15f);
  uint32_t bits;
  std::memcpy(&bits, &f, 4);
  return std::min(255, int((bits - (112u << 23) + (1u << 19)) >> 20));
}

}  // namespace

void encode_block(const TrellisBlock& b) {
  constexpr int L = MOET_LANES;
  Survivor sets[2][4];
  for (int64_t row = 0; row < b.rows; row += L) {
    const int lanes = int(std::min<int64_t>(L, b.rows - row));
    float target[kTrellisColumns][L] = {};
    float largest[L] = {};
    for (int r = 0; r < lanes; ++r) {
      const float* w = b.target + (row + r) * b.target_stride;
      for (int k = 0; k < b.columns; ++k) target[k][r] = w[k], largest[r] = std::max(largest[r], std::fabs(w[k]));
    }
    F least = splat(INFINITY);
    I word[2] = {}, byte = I{};
    for (int c = 0; c < b.candidates; ++c) {
      float scale[L];
      int32_t bytes[L];
      const float share = (b.first_share + float(c) * b.share_step) / kTrellisTop;
      for (int r = 0; r < L; ++r) bytes[r] = scale_byte(largest[r] * share, b.multiplier), scale[r] = scale_value(uint8_t(bytes[r]), b.multiplier);
      F scales;
      I candidate;
      std::memcpy(&scales, scale, sizeof scales);
      std::memcpy(&candidate, bytes, sizeof candidate);
      for (int a = 0; a < 4; ++a) std::memcpy(sets[0][a].left, target, sizeof(F) * b.columns);
      const Survivor& best = search(b, scales, sets);
      const I better = best.cost < least;
      least = select(better, best.cost, least);
      byte = select(better, candidate, byte);
      for (int w = 0; w < 2; ++w) word[w] = select(better, best.word[w], word[w]);
    }
    for (int r = 0; r < lanes; ++r) {
      uint8_t* codes = b.codes + (row + r) * b.codes_stride;
      float* values = b.values + (row + r) * b.values_stride;
      float* errors = b.errors + (row + r) * kTrellisColumns;
      const float scale = scale_value(uint8_t(byte[r]), b.multiplier);
      float left[kTrellisColumns];
      for (int k = 0; k < b.columns; ++k) left[k] = target[k][r];
      for (int k = 0; k < b.columns; ++k) {
        codes[k] = uint32_t(word[k / 16][r]) >> (2 * (k % 16)) & 3;
        values[k] = scale * kTrellisLevels[word[k / 16][r] >> (2 * (k % 16)) & 15];
        errors[k] = (left[k] - values[k]) * (1 / b.feedback[k * kTrellisColumns + k]);
        for (int j = k + 1; j < b.columns; ++j) left[j] -= errors[k] * b.feedback[k * kTrellisColumns + j];
      }
      b.scales[(row + r) * b.scales_stride] = uint8_t(byte[r]);
    }
  }
}

}  // namespace MOET_ISA
}  // namespace moet
