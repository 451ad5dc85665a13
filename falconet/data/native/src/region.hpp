// What a crop needs of an image: which MCUs, at which resolution, in how much memory.
#pragma once
#include "axis.hpp"
#include "jpeg.hpp"
#include "status.hpp"

namespace falconet {

struct Request {
    double x0, y0, x1, y1;  // the box, in pixels of the image
    bool flip;              // left to right
    int size;               // of the output, both ways
    bool planar;
    Filter filter;
};

// A component as far as the crop needs it.
struct Part {
    int wide = 8, high = 8;  // pixels a block is decoded to
    int axes = 0;            // the component whose axes it shares: the first with the same sampling
    int first_row = 0;       // first sample row any weight refers to
    int rows = 0;            // sample rows, padded to whole vectors
    ptrdiff_t columns = 0;   // of the plane
    ptrdiff_t stride = 0;    // bytes from one column of the plane to the next
    size_t plane_bytes() const { return static_cast<size_t>(columns + 8) * static_cast<size_t>(stride) + 64; }
};

struct Region {
    int mcu_x0 = 0, mcu_x1 = 0, mcu_y0 = 0, mcu_y1 = 0;
    Part part[3];
    Axis across[3], down[3];

    Status plan(const Header& header, const Request& request, const Limits& limits);
    // Whether some MCUs before the last needed one are not needed.
    bool skips(const Header& header) const { return mcu_x0 > 0 || mcu_y0 > 0 || mcu_x1 < header.mcus_across(); }
    int padded_size(const Request& request) const {
        return (request.size + vector_pixels - 1) / vector_pixels * vector_pixels;
    }
};

}  // namespace falconet
