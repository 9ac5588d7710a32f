// Native experts to 2-bit rows: what the stages share. docs/quantization.md is the definition.
#pragma once
#include <cstdint>
#include <vector>

#include "../layout/matrix.h"

namespace moet {

// Sums over one matrix; mirrored by moet.quantize.report. unit: in units of each block's own 2^e.
struct EncodeReport {
  int64_t weights = 0, zeros = 0, negative_zeros = 0, alternated = 0;
  double squares = 0;        // sum of v^2
  double errors = 0;         // sum of (q - v)^2
  double unit_bias = 0;      // sum of (q - v) / 2^e
  double unit_squares = 0;   // sum of ((q - v) / 2^e)^2
};

// Source of one expert.
struct Source {
  int32_t format;
  const MatrixView* matrices;   // gate, up, down
  const RowGeometry* geometry;  // of the sym2 row
};

// Throws std::runtime_error naming matrix, row and column if a code, a scale or a multiplier is NaN or infinite; else counts zeros and their signs.
void scan_matrix(const Source& source, int projection, EncodeReport& report);

// MXFP4: all sums are integers times a power of two, kept by scale byte, so that they are exact and do not depend on the order of the work.
struct Mxfp4Sums {
  int64_t squares[256] = {};   // 2^(2s - 2), s = byte - 127
  int64_t errors[256] = {};    // 2^(2s - 10)
  int64_t unit_bias = 0;       // 2^-3
  int64_t unit_squares = 0;    // 2^-14
  void report(EncodeReport& out) const;
};

struct Mxfp4Block {
  uint8_t byte;
  uint64_t codes;
};
// 32 nibbles under the scale byte s; portable.
Mxfp4Block encode_mxfp4_block(const uint8_t* nibbles, int s, bool alternate, Mxfp4Sums& sums);
void encode_mxfp4_strip(const Source& source, const bool alternate[3], const Strip& strip, uint8_t* row, Mxfp4Sums sums[3], bool portable);

// Other formats: float64, sums kept by matrix row and added in the order of the rows.
struct RowSums {
  std::vector<double> squares, errors, unit_bias, unit_squares;
  explicit RowSums(int rows = 0) : squares(rows), errors(rows), unit_bias(rows), unit_squares(rows) {}
  void report(EncodeReport& out) const;
};
void encode_float_strip(const Source& source, const bool alternate[3], const Strip& strip, uint8_t* row, RowSums sums[3], bool portable);

}  // namespace moet
