// The float64 encoder for any CPU, and the choice among its versions.
#define MOET_ISA portable
#define MOET_LANES 2
#include "float_body.h"

namespace moet {

namespace avx2 {
void encode_strip(const Source&, const bool[3], const Strip&, uint8_t*, RowSums[3]);
}
namespace avx512 {
void encode_strip(const Source&, const bool[3], const Strip&, uint8_t*, RowSums[3]);
}

void encode_float_strip(const Source& source, const bool alternate[3], const Strip& strip, uint8_t* row, RowSums sums[3], bool portable) {
#if defined(__x86_64__)
  if (!portable && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bw"))
    return avx512::encode_strip(source, alternate, strip, row, sums);
  if (!portable && __builtin_cpu_supports("avx2")) return avx2::encode_strip(source, alternate, strip, row, sums);
#endif
  portable::encode_strip(source, alternate, strip, row, sums);
}

}  // namespace moet
