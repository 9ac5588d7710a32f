// Blocks of 2- and 4-bit codes times integer activations: within a group the sum is an exact integer, so only the groups' sum rounds.
//
// A byte of a word holds 4 (2) codes of one row. Byte vector i of a group (8 of them) takes one code of every byte; table look-up makes it
// u = (value/unit + bias) / step >= 0; the byte multiply adds products of neighbours into 16 bits. step*sum(u*q) - bias*sum(q) is the group's sum.
// Largest 16-bit sum: 8 vectors * 2 * 8 * 128 = 16384 for sym2; * 15 = 30720 for tcq2; 4 * 2 * 24 * 128 = 24576 for E2M1, hence its sum moves to 32 bits twice.
//
// tcq2 at 3 bytes: levels up to 15 times 32 activations of 23 bits do not fit 32 bits. (level - 1) / 2 = u - 8 does, so the group's sum is
// 2 * sum((u - 8)*q) + sum(q), put together in float32 by one fused multiply-add.

// Byte vector i of the group, from the word vector that holds it.
template <int format>
inline Vec::I bytes_of(Vec::I word, int i) {
  if constexpr (format == kSym2) {
    const int j = i % 4;   // codes j of the bytes: low nibble 0 and 1, high nibble 2 and 3
    const Vec::I nibble = Vec::and_(j < 2 ? word : Vec::srl(word, 4), Vec::splat(0x0f0f0f0fu));
    return j % 2 ? Vec::sym2_second(nibble) : Vec::sym2_first(nibble);
  } else if constexpr (format == kTcq2) {
    const int j = i % 4;   // codes j of the bytes and those after them, which for j = 3 are in the next byte
    return Vec::tcq2_bytes(Vec::and_(j ? Vec::sra(word, 2 * j) : word, Vec::splat(0x0f0f0f0fu)));
  } else {
    return Vec::e2m1_bytes(Vec::and_(i % 2 ? Vec::srl(word, 4) : word, Vec::splat(0x0f0f0f0fu)));
  }
}

// R vectors of rows, M tokens; Z of the D digits, the lowest, are zeros in all M groups.
template <int format, int D, int Z, int R, int M>
inline __attribute__((always_inline)) void int_rows(const uint8_t* block, int row, const uint8_t* acts, float* acc, int64_t acc_row) {
  constexpr int kPerWord = format_bits(format) == 2 ? 4 : 2;       // byte vectors a word
  constexpr int kSpan = format_bits(format) == 2 ? 8 : 4;          // byte vectors that fit a 16-bit sum
  constexpr bool kHalves = format == kTcq2 && D == 3;              // of levels
  constexpr int kStep = kHalves ? 1 : weight_step(format);
  constexpr int kBytes = group_bytes(D);
  // Hides that the next call uses the same activations: GCC would keep all broadcasts and addresses of a block, far more than there are registers.
  asm("" : "+r"(acts), "+r"(block));
  Vec::I total[R][M];
#pragma GCC unroll 2
  for (int span = 0; span < 8 / kSpan; ++span) {
    Vec::I sum[R][M][D];
#pragma GCC unroll 8
    for (int i = 0; i < kSpan; ++i) {
      const int v = span * kSpan + i;
      Vec::I u[R];
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r)
        u[r] = bytes_of<format>(Vec::load_words(block + 4 * (64 * (v / kPerWord) + row + r * Vec::W)), v);
#pragma GCC unroll 4
      for (int m = 0; m < M; ++m)
#pragma GCC unroll 3
        for (int d = Z; d < D; ++d) {
          const Vec::I q = Vec::broadcast_word(acts + m * kBytes + 32 * d + 4 * v);
#pragma GCC unroll 4
          for (int r = 0; r < R; ++r) {
            const Vec::I p = Vec::multiply_bytes(u[r], q);
            sum[r][m][d] = i == 0 ? p : Vec::add16(sum[r][m][d], p);
            asm("" : "+v"(sum[r][m][d]));   // keeps GCC from regrouping the sum, which needs all products at once and spills them
          }
        }
    }
#pragma GCC unroll 4
    for (int m = 0; m < M; ++m) {
      const uint8_t* tail = acts + m * kBytes + 32 * D;            // float scale, int32 correction[2]
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        Vec::I s;                                                  // digits from the highest on: s = 256 s + digit
        if constexpr (D - Z == 1) {
          s = Vec::sum_pairs(sum[r][m][D - 1], kStep);
        } else {
          s = Vec::add32(Vec::sum_pairs(sum[r][m][D - 1], 256 * kStep), Vec::sum_pairs(sum[r][m][D - 2], kStep));
#pragma GCC unroll 3
          for (int d = D - 3; d >= Z; --d) s = Vec::add32(Vec::sll(s, 8), Vec::sum_pairs(sum[r][m][d], kStep));
        }
        if (Z) s = Vec::sll(s, 8 * Z);
        if (format == kMxfp4 && span == 0) { total[r][m] = s; continue; }
        if (format == kMxfp4) s = Vec::add32(s, total[r][m]);
        s = Vec::sub32(s, Vec::broadcast_word(tail + 4 + (format == kNvfp4 ? 4 * span : 0)));
        const Vec::F scale = Vec::mul(row_scales<format>(block, span, row + r * Vec::W), Vec::broadcast(reinterpret_cast<const float*>(tail)));
        Vec::F group = Vec::to_float(s);
        if (kHalves) group = Vec::fma(group, Vec::splat_float(2.0f), Vec::broadcast(reinterpret_cast<const float*>(tail) + 2));
        float* a = acc + m * acc_row + row + r * Vec::W;
        Vec::store(a, Vec::fma(group, scale, Vec::load(a)));
      }
    }
  }
}

// A block's 64 rows for M tokens whose groups are at `acts`.
template <int format, int D, int R, int M>
inline __attribute__((always_inline)) void int_block(const uint8_t* block, const uint8_t* acts, float* acc, int64_t acc_row) {
  if constexpr (D == 3) {
    // Values that came from bfloat16 mostly need two bytes: a third less work, and the sum is the same.
    uint32_t low = 0;
    for (int m = 0; m < M; ++m) low |= acts[m * group_bytes(D) + kLowDigit];
    if (!low) {
      for (int row = 0; row < 64; row += R * Vec::W) int_rows<format, D, 1, R, M>(block, row, acts, acc, acc_row);
      return;
    }
  }
  for (int row = 0; row < 64; row += R * Vec::W) int_rows<format, D, 0, R, M>(block, row, acts, acc, acc_row);
}

template <int format, int D>
void run_int(const BlockRun& run) {
  constexpr int kTokens = 4;
  const uint8_t* block = run.blocks;
  const uint8_t* acts = run.acts;
  float* acc = run.acc;
  for (int i = 0; i < run.count; ++i, block += block_bytes(format), acts += run.acts_step, acc += run.acc_step) {
    prefetch_block<format>(block + run.ahead);
    int m = 0;
    for (; m + kTokens <= run.tokens; m += kTokens)
      int_block<format, D, 1, kTokens>(block, acts + m * group_bytes(D), acc + m * run.acc_row, run.acc_row);
    for (; m < run.tokens; ++m)
      int_block<format, D, 2, 1>(block, acts + m * group_bytes(D), acc + m * run.acc_row, run.acc_row);
  }
}
