// CRC-32C (Castagnoli), the checksum of TFRecords and of packed shards.
#pragma once
#include <cstddef>
#include <cstdint>

namespace falconet {

// Of `size` bytes that follow others whose checksum is `before` (0: none do).
uint32_t crc32c(const uint8_t* data, size_t size, uint32_t before);

// The same by tables alone; for tests, and for processors without the instruction.
uint32_t crc32c_portable(const uint8_t* data, size_t size, uint32_t before);

}  // namespace falconet
