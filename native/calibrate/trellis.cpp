// The trellis search for any CPU, the choice among its versions, and its entry in the C ABI.
#define MOET_ISA trellis_portable
#define MOET_LANES 4
#include "trellis_body.h"

#include "../include/api.h"

namespace moet {
namespace trellis_avx2 {
void encode_block(const TrellisBlock&);
}
}  // namespace moet

// portable: no vector instructions beyond the CPU's baseline; same bytes.
MOET_API int moet_trellis_block(const moet::TrellisBlock* block, int32_t portable, char* err, size_t err_len) {
  return moet::guarded(err, err_len, [&] {
#if defined(__x86_64__)
    if (!portable && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return moet::trellis_avx2::encode_block(*block);
#endif
    moet::trellis_portable::encode_block(*block);
  });
}
