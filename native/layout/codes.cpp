#include "codes.h"

#include "transpose.h"

namespace moet {
namespace {

// Word w along K of a strip: its 64 row words in the row.
inline int64_t word_offset(int32_t format, const Strip& strip, int w) {
  const int bits = format_bits(format);   // a block has as many words a row as a code has bits
  return strip.offset + int64_t(w / bits) * strip.stride + (w % bits) * (4 * kBlockRows);
}

// Walks a strip in pieces of 8 rows x 8 words. Two neighbouring pieces make a cache line of the source, so they go together.
template <typename Piece>
inline void for_each_piece(int32_t format, const Strip& strip, Piece&& piece) {
  const int words = strip.blocks * format_bits(format);
  for (int w0 = 0; w0 < words; w0 += 16)
    for (int r0 = 0; r0 < kBlockRows; r0 += 8)
      for (int w = w0; w < std::min(w0 + 16, words); w += 8) piece(r0, w, std::min(8, words - w));
}

template <typename Isa>
void pack(int32_t format, const Strip& strip, const RowPointers& rows, uint8_t* row) {
  const int64_t bytes = code_row_bytes(format, strip.cols);
  for_each_piece(format, strip, [&](int r0, int w0, int words) {
    uint8_t edge[8][32], spill[32];
    const uint8_t* in[8];
    uint8_t* out[8];
    const int64_t at = 4ll * w0, valid = std::clamp<int64_t>(bytes - at, 0, 32);
    for (int r = 0; r < 8; ++r) {
      const uint8_t* source = rows.row[r0 + r];
      if (source && w0 % 16 == 0) __builtin_prefetch(source + at + 64);   // 64 rows are more streams than the CPU follows by itself
      in[r] = edge[r];
      if (source && valid == 32) {
        in[r] = source + at;
      } else {
        std::memset(edge[r], 0, 32);
        if (source && valid) std::memcpy(edge[r], source + at, valid);
      }
    }
    for (int w = 0; w < 8; ++w) out[w] = w < words ? row + word_offset(format, strip, w0 + w) + 4 * r0 : spill;
    Isa::transpose(in, out);
  });
}

template <typename Isa>
void unpack(int32_t format, const Strip& strip, const RowPointers& rows, const uint8_t* row) {
  static constexpr uint8_t kZero[32] = {};
  const int64_t bytes = code_row_bytes(format, strip.cols);
  for_each_piece(format, strip, [&](int r0, int w0, int words) {
    uint8_t edge[8][32];
    const uint8_t* in[8];
    uint8_t* out[8];
    const int64_t at = 4ll * w0, valid = std::clamp<int64_t>(bytes - at, 0, 32);
    for (int w = 0; w < 8; ++w) in[w] = w < words ? row + word_offset(format, strip, w0 + w) + 4 * r0 : kZero;
    for (int r = 0; r < 8; ++r) {
      uint8_t* target = const_cast<uint8_t*>(rows.row[r0 + r]);
      out[r] = target && valid == 32 ? target + at : edge[r];
    }
    Isa::transpose(in, out);
    for (int r = 0; r < 8; ++r)
      if (rows.row[r0 + r] && valid && valid < 32) std::memcpy(const_cast<uint8_t*>(rows.row[r0 + r]) + at, edge[r], valid);
  });
}

bool has_avx2() {
#if defined(__x86_64__)
  static const bool yes = __builtin_cpu_supports("avx2");
  return yes;
#else
  return false;
#endif
}

}  // namespace

void pack_codes(int32_t format, const Strip& strip, const RowPointers& rows, uint8_t* row) {
#if defined(__x86_64__)
  if (has_avx2()) return pack<Avx2>(format, strip, rows, row);
#endif
  pack<Portable>(format, strip, rows, row);
}

void unpack_codes(int32_t format, const Strip& strip, const RowPointers& rows, const uint8_t* row) {
#if defined(__x86_64__)
  if (has_avx2()) return unpack<Avx2>(format, strip, rows, row);
#endif
  unpack<Portable>(format, strip, rows, row);
}

}  // namespace moet
