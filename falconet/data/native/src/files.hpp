// Whole files into memory.
#pragma once
#include <cstdint>

#include "buffer.hpp"
#include "status.hpp"

namespace falconet {

// Reads a regular file of at most `most` bytes into `buffer`.
Status read_file(const char* path, int64_t most, Buffer<uint8_t>& buffer, size_t& size);

}  // namespace falconet
