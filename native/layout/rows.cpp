// Rows as a whole: packing, unpacking, values, checksums.
#include <cmath>
#include <stdexcept>
#include <string>

#include "../include/api.h"
#include "../include/row_check.h"
#include "codes.h"
#include "scales.h"

namespace moet {
namespace {

void pack_row(const RowGeometry& g, const MatrixView* m, uint8_t* row) {
  const Extras extras{{m[0].multiplier, m[1].multiplier, m[2].multiplier}, {m[0].bias, m[1].bias, m[2].bias}};
  fill_row(g, extras, row, [&](const Strip& strip, uint8_t* out) {
    pack_codes(g.format, strip, row_pointers(g, strip, m), out);
    const bool whole = strip.half[0].valid == 32 && strip.half[1].valid == 32 && strip.blocks * kBlockCols == strip.cols;
    if (!whole || g.format == kFp8)
      for (int b = 0; b < strip.blocks; ++b)
        std::memset(out + strip.offset + b * strip.stride + block_code_bytes(g.format), 0, block_scale_bytes(g.format));
    for_each_scale(g, strip, m, out, [](const uint8_t* source, const uint8_t* target, int bytes) {
      std::memcpy(const_cast<uint8_t*>(target), source, bytes);
    });
  });
}

void unpack_row(const RowGeometry& g, const uint8_t* row, const MatrixView* m) {
  const auto strip_out = [&](const Strip& strip) {
    unpack_codes(g.format, strip, row_pointers(g, strip, m), row);
    for_each_scale(g, strip, m, row, [](const uint8_t* target, const uint8_t* source, int bytes) {
      std::memcpy(const_cast<uint8_t*>(target), source, bytes);
    });
  };
  for (int t = 0; t < g.tiles(); ++t) {
    const Strip strip = w13_strip(g, t);
    strip_out(strip);
    const uint8_t* bias = row + strip.offset + g.w13_tile_bytes() - 256;
    for (int h = 0; g.biased && h < 2; ++h)
      if (strip.half[h].valid) std::memcpy(const_cast<float*>(m[h].bias) + strip.half[h].row, bias + 128 * h, 4 * strip.half[h].valid);
  }
  for (int i = 0; i < w2_strips(g); ++i) strip_out(w2_strip(g, i));
  if (g.biased) std::memcpy(const_cast<float*>(m[kDown].bias), row + bias_offset(g), 4ll * g.hidden);
}

float e4m3_value(uint8_t byte) {
  const int exponent = byte >> 3 & 15, mantissa = byte & 7;
  if ((byte & 0x7f) == 0x7f) return std::nanf("");
  const float magnitude = exponent ? std::ldexp(float(8 + mantissa), exponent - 10) : std::ldexp(float(mantissa), -9);
  return byte & 0x80 ? -magnitude : magnitude;
}

struct ValueTables {
  float e4m3[256], ue8m0[256], ue5m3[256];
  ValueTables() {
    for (int i = 0; i < 256; ++i) e4m3[i] = e4m3_value(uint8_t(i)), ue8m0[i] = i == 255 ? std::nanf("") : std::ldexp(1.0f, i - 127), ue5m3[i] = std::ldexp(float(8 + i % 8), i / 8 - 18);
  }
};
constexpr float kSym2Values[4] = {-4, -1, 1, 4};
constexpr float kE2m1Values[16] = {0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0f, -0.5, -1, -1.5, -2, -3, -4, -6};

// The value of one code in double, where every product is exact (at most 30 bits); the caller's cast rounds it once.
double scale_of(const RowGeometry& g, const ValueTables& t, const uint8_t* scales, int r, int k, float multiplier) {
  const auto at = [&](int i) { float f; std::memcpy(&f, scales + 4 * i, 4); return double(f); };
  switch (g.format) {
    case kSym2: case kMxfp4: return t.ue8m0[scales[r]];
    case kTcq2: return double(t.ue5m3[scales[r]]) * multiplier;
    case kNvfp4: return double(t.e4m3[scales[64 * (k / 16) + r]]) * multiplier;
    case kFp8: return at(r / 32);
    case kFp8Row: return at(r);
    default: return 1;
  }
}

float code_value(const RowGeometry& g, const ValueTables& t, const uint8_t* codes, int r, int k) {
  const int bits = format_bits(g.format), per_word = 32 / bits;
  uint32_t word;
  std::memcpy(&word, codes + (k / per_word) * 256 + 4 * r, 4);
  if (g.format == kTcq2) return kTcq2Levels[int32_t(word) >> 2 * (k % 16) & 15];
  const uint32_t code = word >> (k % per_word * bits) & ((1u << bits) - 1);
  switch (bits) {
    case 2: return kSym2Values[code];
    case 4: return kE2m1Values[code];
    case 8: return t.e4m3[code];
    default: { const uint32_t f = code << 16; float v; std::memcpy(&v, &f, 4); return v; }
  }
}

void dequantize_row(const RowGeometry& g, const uint8_t* row, float* const out[3]) {
  static const ValueTables tables;
  float multiplier[3];
  std::memcpy(multiplier, row + g.extras_offset(), sizeof multiplier);
  const auto strip_values = [&](const Strip& strip) {
    for (int b = 0; b < groups_of_32(strip.cols); ++b) {
      const uint8_t* codes = row + strip.offset + b * strip.stride;
      const uint8_t* scales = codes + block_code_bytes(g.format);
      const int k0 = 32 * b, columns = std::min(32, strip.cols - k0);
      for (int r = 0; r < kBlockRows; ++r) {
        const Half& h = strip.half[r / 32];
        if (r % 32 >= h.valid) continue;
        float* values = out[h.projection] + int64_t(h.row + r % 32) * strip.cols + k0;
        for (int k = 0; k < columns; ++k)
          values[k] = float(code_value(g, tables, codes, r, k) * scale_of(g, tables, scales, r, k, multiplier[h.projection]));
      }
    }
  };
  for (int t = 0; t < g.tiles(); ++t) strip_values(w13_strip(g, t));
  for (int i = 0; i < w2_strips(g); ++i) strip_values(w2_strip(g, i));
}

}  // namespace

int check_slice(const RowGeometry& g, int tile_begin, int tile_end, const RowView& view, uint8_t* bad) {
  int count = 0;
  const auto note = [&](int index, bool is_bad) { count += is_bad; if (bad) bad[index] = is_bad; };
  const auto word = [&](int64_t offset) { uint32_t w; std::memcpy(&w, view.extras + (offset - g.extras_offset()), 4); return w; };
  note(2 * g.tiles(), crc32c(view.extras, g.extras_bytes() - 4) != word(g.row_bytes() - 4));
  for (int t = tile_begin; t < tile_end; ++t) {
    const int64_t i = t - tile_begin;
    note(t, crc32c(view.w13 + i * g.w13_tile_bytes(), g.w13_tile_bytes()) != word(crc_offset(g) + 4 * t));
    note(g.tiles() + t, crc32c(view.w2 + i * g.w2_tile_bytes(), g.w2_tile_bytes()) != word(crc_offset(g) + 4 * (g.tiles() + t)));
  }
  return count;
}

bool crcs_hold(const RowGeometry& g, int tile_begin, int tile_end, const uint8_t* extras, const uint32_t* crcs) {
  const size_t tiles = static_cast<size_t>(tile_end - tile_begin);
  const auto same = [&](const uint32_t* found, int64_t offset, size_t n) { return std::memcmp(found, extras + (offset - g.extras_offset()), 4 * n) == 0; };
  return same(crcs, crc_offset(g) + 4 * tile_begin, tiles) && same(crcs + tiles, crc_offset(g) + 4 * (g.tiles() + tile_begin), tiles) &&
         same(crcs + 2 * tiles, g.row_bytes() - 4, 1);
}

}  // namespace moet

using namespace moet;

// matrices: gate, up, down. row: row_bytes, all of it written.
MOET_API int moet_pack_row(const RowGeometry* g, const MatrixView* matrices, uint8_t* row, char* err, size_t err_len) {
  return guarded(err, err_len, [&] { pack_row(*g, matrices, row); });
}

// matrices: arrays to be written, allocated by the caller.
MOET_API int moet_unpack_row(const RowGeometry* g, const uint8_t* row, const MatrixView* matrices, char* err, size_t err_len) {
  return guarded(err, err_len, [&] { unpack_row(*g, row, matrices); });
}

MOET_API int moet_dequantize_row(const RowGeometry* g, const uint8_t* row, float* gate, float* up, float* down, char* err, size_t err_len) {
  return guarded(err, err_len, [&] {
    float* const out[3] = {gate, up, down};
    dequantize_row(*g, row, out);
  });
}

// bad: uint8 [2 * tiles + 1]: w13 tiles, w2 tiles, extras; 1 where the checksum does not hold.
MOET_API int moet_check_slice(const RowGeometry* g, int32_t tile_begin, int32_t tile_end, const uint8_t* w13, const uint8_t* w2, const uint8_t* extras,
                              uint8_t* bad, char* err, size_t err_len) {
  return guarded(err, err_len, [&] { check_slice(*g, tile_begin, tile_end, RowView{w13, w2, extras}, bad); });
}
