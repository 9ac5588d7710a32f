// Blocks times float32 activations. Included once per ISA, inside its namespace and target; Vec is the ISA's vector.

// Codes of one row per lane, ready for `decode`.
template <int format>
struct Words {
  Vec::I word;
  static Words load(const uint8_t* p) { return {Vec::load_words(p)}; }
};
template <>
struct Words<kTcq2> {
  Vec::Tcq2 word;
  static Words load(const uint8_t* p) { return {Vec::Tcq2(Vec::load_words(p))}; }
};

// One decoded column of W rows; j is the code's number within its word.
template <int format>
inline Vec::F decode(const Words<format>& words, int j) {
  const auto& word = words.word;
  if constexpr (format == kSym2) {
    return Vec::sym2(Vec::srl(word, 2 * j));
  } else if constexpr (format == kTcq2) {
    return word[j];
  } else if constexpr (format == kMxfp4 || format == kNvfp4) {
    return Vec::e2m1(Vec::srl(word, 4 * j));
  } else if constexpr (format == kFp8 || format == kFp8Row) {
    return Vec::e4m3(Vec::srl(word, 8 * j));
  } else {
    return Vec::cast(j ? Vec::and_(word, Vec::splat(0xffff0000u)) : Vec::sll(word, 16));
  }
}

// Scales of rows [row, row + W) of a block, for columns of half `half` (nvfp4 has one per 16 columns).
template <int format>
inline Vec::F row_scales(const uint8_t* block, int half, int row) {
  const uint8_t* scales = block + block_code_bytes(format);
  if constexpr (format == kSym2 || format == kMxfp4) {
    return Vec::ue8m0(Vec::load_bytes(scales + row));
  } else if constexpr (format == kTcq2) {
    return Vec::ue5m3(Vec::load_bytes(scales + row));
  } else if constexpr (format == kNvfp4) {
    return Vec::e4m3(Vec::load_bytes(scales + 64 * half + row));
  } else if constexpr (format == kFp8) {
    return Vec::broadcast(reinterpret_cast<const float*>(scales) + row / 32);   // W divides 32
  } else if constexpr (format == kFp8Row) {
    return Vec::load(reinterpret_cast<const float*>(scales) + row);
  } else {
    return Vec::splat_float(1.0f);
  }
}

// The block's values without their scales, [column][row].
template <int format>
inline void decode_block(const uint8_t* block, float* values) {
  constexpr int kCodes = 32 / format_bits(format);
  for (int s = 0; s < format_bits(format); ++s)
    for (int row = 0; row < 64; row += Vec::W) {
      const auto word = Words<format>::load(block + 4 * (64 * s + row));
#pragma GCC unroll 16
      for (int j = 0; j < kCodes; ++j) Vec::store(values + 64 * (s * kCodes + j) + row, decode<format>(word, j));
    }
}

// R vectors of rows from `row` on, M tokens. kDecoded: the values are in `values` already.
template <int format, int R, int M, bool kDecoded>
inline __attribute__((always_inline)) void float_rows(const uint8_t* block, const float* values, int row, const float* x, float* acc, int64_t acc_row) {
  constexpr int kCodes = 32 / format_bits(format);                 // codes a word
  constexpr int kHalves = format == kNvfp4 ? 2 : 1;
  constexpr int kWords = 32 / kCodes / kHalves;                    // words a scale
  for (int half = 0; half < kHalves; ++half) {
    Vec::F part[R][M];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
      for (int m = 0; m < M; ++m) part[r][m] = Vec::zero();
    for (int s = half * kWords; s < (half + 1) * kWords; ++s) {
      Words<format> word[R];
#pragma GCC unroll 8
      for (int r = 0; r < R && !kDecoded; ++r) word[r] = Words<format>::load(block + 4 * (64 * s + row + r * Vec::W));
#pragma GCC unroll 16
      for (int j = 0; j < kCodes; ++j) {
        Vec::F xs[M];
#pragma GCC unroll 8
        for (int m = 0; m < M; ++m) xs[m] = Vec::broadcast(x + 32 * m + s * kCodes + j);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
          const Vec::F v = kDecoded ? Vec::load(values + 64 * (s * kCodes + j) + row + r * Vec::W) : decode<format>(word[r], j);
#pragma GCC unroll 8
          for (int m = 0; m < M; ++m) part[r][m] = Vec::fma(v, xs[m], part[r][m]);
        }
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const Vec::F scale = row_scales<format>(block, half, row + r * Vec::W);
#pragma GCC unroll 8
      for (int m = 0; m < M; ++m) {
        float* a = acc + m * acc_row + row + r * Vec::W;
        Vec::store(a, Vec::fma(part[r][m], scale, Vec::load(a)));
      }
    }
  }
}

template <int format>
void run_float(const BlockRun& run) {
  constexpr int kOne = 4, kMany = 2, kTokens = 4;   // vectors of rows for one token, for several; tokens at once
  constexpr int kDecodeFor = 8;                     // tokens from which decoding to L1 pays: 8 KiB written and read instead of 2 to 7 instructions a vector
  alignas(64) float values[kBlockCols * kBlockRows];
  const uint8_t* block = run.blocks;
  const uint8_t* acts = run.acts;
  float* acc = run.acc;
  const bool decoded = run.tokens >= kDecodeFor;
  for (int i = 0; i < run.count; ++i, block += block_bytes(format), acts += run.acts_step, acc += run.acc_step) {
    const float* x = reinterpret_cast<const float*>(acts);
    prefetch_block<format>(block + run.ahead);
    if (decoded) decode_block<format>(block, values);
    int m = 0;
    for (; m + kTokens <= run.tokens; m += kTokens)
      for (int row = 0; row < 64; row += kMany * Vec::W) {
        float* a = acc + m * run.acc_row;
        if (decoded) float_rows<format, kMany, kTokens, true>(block, values, row, x + 32 * m, a, run.acc_row);
        else float_rows<format, kMany, kTokens, false>(block, values, row, x + 32 * m, a, run.acc_row);
      }
    for (; m < run.tokens; ++m)
      for (int row = 0; row < 64; row += kOne * Vec::W)
        float_rows<format, kOne, 1, false>(block, values, row, x + 32 * m, acc + m * run.acc_row, run.acc_row);
  }
}
