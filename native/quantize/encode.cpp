// encode_row: scan, then one pass over the source that writes the row and its checksums.
#include "encode.h"

#include <xmmintrin.h>

#include <cmath>

#include "../include/api.h"

namespace moet {

void Mxfp4Sums::report(EncodeReport& out) const {
  for (int s = 0; s < 255; ++s) {
    out.squares += std::ldexp(double(squares[s]), 2 * (s - 127) - 2);
    out.errors += std::ldexp(double(errors[s]), 2 * (s - 127) - 10);
  }
  out.unit_bias = std::ldexp(double(unit_bias), -3);
  out.unit_squares = std::ldexp(double(unit_squares), -14);
}

void RowSums::report(EncodeReport& out) const {
  for (double v : squares) out.squares += v;
  for (double v : errors) out.errors += v;
  for (double v : unit_bias) out.unit_bias += v;
  for (double v : unit_squares) out.unit_squares += v;
}

namespace {

// Subnormals are values here: a caller's flush-to-zero mode (MXCSR) must not reach the arithmetic.
struct DefaultFloatMode {
  unsigned saved = _mm_getcsr();
  DefaultFloatMode() { _mm_setcsr(0x1f80); }
  ~DefaultFloatMode() { _mm_setcsr(saved); }
};

void encode_row(const Source& source, uint8_t* row, EncodeReport* reports, bool portable) {
  const DefaultFloatMode mode;
  const RowGeometry& g = *source.geometry;
  bool alternate[3];
  for (int p = 0; p < 3; ++p) {
    EncodeReport& r = reports[p] = {};
    r.weights = int64_t(g.hidden) * g.inter;
    scan_matrix(source, p, r);
    // Fewer than 5 % of one sign: the exporter wrote no signs for zeros, and keeping them would push every weight of a sum the same way.
    alternate[p] = 20 * std::min(r.negative_zeros, r.zeros - r.negative_zeros) < r.zeros;
    r.alternated = alternate[p];
  }
  const MatrixView* m = source.matrices;
  const Extras extras{{1, 1, 1}, {m[0].bias, m[1].bias, m[2].bias}};
  if (source.format == kMxfp4) {
    std::vector<Mxfp4Sums> sums(3);
    fill_row(g, extras, row, [&](const Strip& strip, uint8_t* out) { encode_mxfp4_strip(source, alternate, strip, out, sums.data(), portable); });
    for (int p = 0; p < 3; ++p) sums[p].report(reports[p]);
  } else {
    RowSums sums[3] = {RowSums(g.inter), RowSums(g.inter), RowSums(g.hidden)};
    fill_row(g, extras, row, [&](const Strip& strip, uint8_t* out) { encode_float_strip(source, alternate, strip, out, sums, portable); });
    for (int p = 0; p < 3; ++p) sums[p].report(reports[p]);
  }
}

}  // namespace
}  // namespace moet

// g: geometry of the sym2 row. matrices: gate, up, down in `source_format`. row: row_bytes, all of it written. reports: one per matrix.
// portable != 0: no vector instructions beyond the baseline; same bytes (tests). Safe to call from several threads at once.
MOET_API int moet_encode_row(const moet::RowGeometry* g, int32_t source_format, const moet::MatrixView* matrices, uint8_t* row,
                             moet::EncodeReport* reports, int32_t portable, char* err, size_t err_len) {
  return moet::guarded(err, err_len, [&] { moet::encode_row({source_format, matrices, g}, row, reports, portable != 0); });
}
