// Resampling weights along one axis: one of Pillow's antialiased filters, or TensorFlow 1's between two neighbours,
// applied to a component at its own resolution.
#pragma once
#include <cstdint>
#include <vector>

#include "kernels.hpp"

namespace falconet {

// The numbers are the C interface's: binding.py names the same ones.
enum class Filter : int32_t {
    bilinear = 0,
    sampled = 1,  // not antialiased: an output is between the two pixels at its begin, of which both lie in the box
    bicubic = 2,  // Catmull-Rom, as Pillow's: some weights are negative
};

struct AxisRequest {
    double begin, end;  // of the box, in pixels of the full-resolution grid
    int pixels;         // of that grid in the whole image
    int samples;        // of the component in the whole image
    int ratio;          // pixels a sample stands for
    bool smooth;        // ratio 2: other decoders interpolate between samples when they enlarge the component
    int size;           // outputs
    bool flip;
    Filter filter;
    int one;  // what the weights of one output add up to
};

class Axis {
public:
    // False: one output is the mean of so many samples that 16-bit weights are too coarse.
    bool build(const AxisRequest& request);

    int lowest() const { return lowest_; }    // sample that any weight refers to
    int highest() const { return highest_; }  // one beyond the last
    // `origin`: the first sample in the plane. Call it once.
    AxisView view(int origin);

private:
    std::vector<int32_t> first_, count_;
    std::vector<int16_t> weights_;
    std::vector<double> pixel_weights_, sample_weights_;
    int stride_ = 0, size_ = 0, lowest_ = 0, highest_ = 0;
    Filter filter_ = Filter::bilinear;
};

}  // namespace falconet
