// One image, from the bytes of a file to the pixels of its place in the batch.
#pragma once
#include <vector>

#include "buffer.hpp"
#include "jpeg.hpp"
#include "kernels.hpp"
#include "region.hpp"

namespace falconet {

class Decoder {
public:
    Decoder(const Kernels& kernels, const Limits& limits) : kernels_(kernels), limits_(limits) {}

    // What the header says; not ok: the image is left to another decoder.
    Status measure(const uint8_t* data, size_t size, int& width, int& height) const;
    // Crops, resizes and flips into `out`: size x size x 3 bytes. Its content is undefined unless the result is ok.
    Status decode(const uint8_t* data, size_t size, const Request& request, uint8_t* out);

    const Kernels& kernels() const { return kernels_; }

private:
    Status decode_planes(const uint8_t* data, size_t size, const Header& header);
    void resize(const Header& header, const Request& request, uint8_t* out);
    void give_back_large_buffers();

    const Kernels& kernels_;
    Limits limits_;
    Tables tables_;
    Region region_;
    std::vector<size_t> restarts_;
    Buffer<uint8_t> clean_;
    Buffer<int8_t> planes_[3];
    Buffer<int16_t> sideways_, columns_[3], rows_;
};

// Where the restart intervals of a scan start, and where the last one ends. False: they are invalid.
bool find_restarts(const uint8_t* data, const uint8_t* end, const Header& header, std::vector<size_t>& restarts);

}  // namespace falconet
