// CRC-32C (Castagnoli, reflected polynomial 0x82F63B78, initial and final inversion), as in iSCSI (RFC 3720) and ext4.
#pragma once
#include <cstddef>
#include <cstdint>

namespace moet {

// CRC of `data`; `seed` is the CRC of the bytes before it (0: none), so that crc32c(b, crc32c(a)) == crc32c(a + b).
uint32_t crc32c(const void* data, size_t size, uint32_t seed = 0);

// CRC of a + b from the CRCs of both and the length of b.
uint32_t crc32c_combine(uint32_t crc_a, uint32_t crc_b, uint64_t size_b);

}  // namespace moet
