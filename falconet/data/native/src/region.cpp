// From a box to the part of the scan it needs.
#include "region.hpp"

#include <algorithm>

namespace falconet {
namespace {

// A picture is decoded at a half, a quarter or an eighth only if it stays this many times larger than the output: the
// resize that follows then decides how it looks, not the cut of the transform.
constexpr double least_reduction_left = 2.0;
constexpr int most_size = 4096;

int divided(int64_t value, int64_t by) { return static_cast<int>((value + by - 1) / by); }  // rounded up

// Pixels a block of the component with the most samples becomes: 8, 4, 2 or 1.
int side_for(const Request& request) {
    if (request.filter == Filter::sampled) return 8;  // a reduced block would be an average
    const double reduction = std::min(request.x1 - request.x0, request.y1 - request.y0) / request.size;
    int side = 8;
    while (side > 1 && reduction * (side / 2) / 8 >= least_reduction_left) side /= 2;
    return side;
}

bool lies_in(const Request& request, const Header& header) {  // written so that a NaN is outside
    return request.x0 >= 0 && request.x0 < request.x1 && request.x1 <= header.width && request.y0 >= 0 &&
           request.y0 < request.y1 && request.y1 <= header.height;
}

}  // namespace

Status Region::plan(const Header& header, const Request& request, const Limits& limits) {
    if (request.size < 1 || request.size > most_size || !lies_in(request, header)) return Status::bad_request;
    if (static_cast<int64_t>(header.width) * header.height > limits.pixels) return Status::too_large;
    const int side = side_for(request);
    const double shrink = side / 8.0;
    // In bicubic a weight may be more than one, at a border: one bit less, which the second resize gives back.
    const int across_one = request.filter == Filter::bicubic ? 1 << 14 : 1 << 15;
    mcu_x0 = mcu_y0 = INT32_MAX;
    mcu_x1 = mcu_y1 = 0;
    for (int c = 0; c < header.components; ++c) {
        const Component& component = header.component[c];
        Part& p = part[c];
        p = Part();
        int ratio_x = header.max_across / component.across, ratio_y = header.max_down / component.down;
        // A component with fewer samples one way need not be reduced as far that way.
        p.wide = p.high = side;
        for (; p.wide < 8 && ratio_x % 2 == 0; ratio_x /= 2) p.wide *= 2;
        for (; p.high < 8 && ratio_y % 2 == 0; ratio_y /= 2) p.high *= 2;
        const int own_width = divided(static_cast<int64_t>(header.width) * component.across, header.max_across);
        const int own_height = divided(static_cast<int64_t>(header.height) * component.down, header.max_down);
        // libjpeg interpolates in these cases; all others it enlarges by repeating samples.
        const bool smooth_x = ratio_x == 2 && ratio_y <= 2 && own_width > 2;
        const bool smooth_y = ratio_y == 2 && (ratio_x == 1 || smooth_x);

        p.axes = c;
        for (int before = c - 1; before >= 0; --before)
            if (header.component[before].across == component.across && header.component[before].down == component.down)
                p.axes = before;
        if (p.axes == c) {
            AxisRequest x{request.x0 * shrink,
                          request.x1 * shrink,
                          divided(static_cast<int64_t>(header.width) * side, 8),
                          divided(static_cast<int64_t>(own_width) * p.wide, 8),
                          ratio_x,
                          smooth_x,
                          request.size,
                          request.flip,
                          request.filter,
                          across_one};
            AxisRequest y{request.y0 * shrink,
                          request.y1 * shrink,
                          divided(static_cast<int64_t>(header.height) * side, 8),
                          divided(static_cast<int64_t>(own_height) * p.high, 8),
                          ratio_y,
                          smooth_y,
                          request.size,
                          false,
                          request.filter,
                          1 << 14};
            if (!across[c].build(x) || !down[c].build(y)) return Status::unsupported;
        }
        const Axis &ax = across[p.axes], &ay = down[p.axes];
        const int mcu_width = component.across * p.wide, mcu_height = component.down * p.high;
        mcu_x0 = std::min(mcu_x0, ax.lowest() / mcu_width);
        mcu_y0 = std::min(mcu_y0, ay.lowest() / mcu_height);
        mcu_x1 = std::max(mcu_x1, divided(ax.highest(), mcu_width));
        mcu_y1 = std::max(mcu_y1, divided(ay.highest(), mcu_height));
        p.first_row = ay.lowest();
        p.rows = divided(ay.highest() - ay.lowest(), vector_pixels) * vector_pixels;
    }
    mcu_x1 = std::min(mcu_x1, header.mcus_across());
    mcu_y1 = std::min(mcu_y1, header.mcus_down());

    size_t bytes = 0;
    const size_t padded = static_cast<size_t>(padded_size(request));
    for (int c = 0; c < header.components; ++c) {
        Part& p = part[c];
        const int rows = (mcu_y1 - mcu_y0) * header.component[c].down * p.high;
        p.columns = static_cast<ptrdiff_t>(mcu_x1 - mcu_x0) * header.component[c].across * p.wide;
        // The resize reads whole vectors, up to one beyond the last row.
        p.stride = divided(rows, vector_pixels) * vector_pixels + vector_pixels;
        bytes += p.plane_bytes() + 2 * padded * static_cast<size_t>(p.rows) * sizeof(int16_t);
    }
    return bytes > static_cast<size_t>(limits.bytes) ? Status::too_large : Status::ok;
}

}  // namespace falconet
