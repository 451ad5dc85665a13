// Files, and ranges of larger ones, into memory.
#pragma once
#include <cstdint>

#include "buffer.hpp"
#include "status.hpp"

namespace falconet {

// Reads a regular file of at most `most` bytes into `buffer`.
Status read_file(const char* path, int64_t most, Buffer<uint8_t>& buffer, size_t& size);

// An image within an open file: `size` bytes from `begin` on are read and have this checksum; the image is `length` of
// them from `skip` on.
struct Range {
    int32_t file;
    int64_t begin, size, skip, length;
    uint32_t crc32c;
};

// Whether such a range can be, whatever its file holds, and has at most `most` bytes; the two below ask it first.
Status check(const Range& range, int64_t most);

// Asks the system to start reading; nothing waits for it.
void expect(const Range& range, int64_t most);

// Reads a range of at most `most` bytes and leaves the image alone at the start of `buffer`.
Status read_range(const Range& range, bool checked, int64_t most, Buffer<uint8_t>& buffer, size_t& size);

}  // namespace falconet
