// The same JPEG with restart markers, so that a crop is decoded without what precedes it. Lossless: the quantised
// coefficients are the same, so every decoder gives the same pixels.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

#include "status.hpp"

namespace falconet {

// A restart marker after every `interval` MCUs, Huffman tables made for this image, metadata left out.
Status restart_marked(const uint8_t* data, size_t size, int interval, int64_t most_pixels, std::vector<uint8_t>& out);

}  // namespace falconet
