// Enlarging a component and resizing the result are both linear, so their weights are multiplied out here, once per
// axis, and the component is never enlarged: what other decoders do in two steps is one short sum over its own samples.
#include "axis.hpp"

#include <algorithm>
#include <cmath>

namespace falconet {

namespace {

// The weight of a pixel this many half-widths of the bilinear triangle away; Pillow's constant, a = -0.5, for bicubic.
double weight_at(Filter filter, double distance) {
    const double x = std::fabs(distance);
    if (filter != Filter::bicubic) return std::max(0.0, 1.0 - x);
    constexpr double a = -0.5;
    if (x < 1) return ((a + 2) * x - (a + 3)) * x * x + 1;
    return x < 2 ? (((x - 5) * x + 8) * x - 4) * a : 0.0;
}

}  // namespace

constexpr int most_taps = 1024;  // at 15 bits a weight is 32 then, and its rounding a few per cent

bool Axis::build(const AxisRequest& request) {
    const double scale = (request.end - request.begin) / request.size;  // pixels an output stands for
    const bool sampled = request.filter == Filter::sampled;
    const double unit = sampled ? 1.0 : std::max(scale, 1.0);  // half the width of the bilinear triangle
    const double support = request.filter == Filter::bicubic ? 2 * unit : unit;
    if (support > most_taps / 2 - 2) return false;
    const int most_pixels = 2 * static_cast<int>(std::ceil(support)) + 1;
    stride_ = most_pixels + 2;  // enlarging reaches one sample further on each side
    size_ = request.size;
    filter_ = request.filter;
    const size_t outputs = static_cast<size_t>(size_);
    first_.resize(outputs);
    count_.resize(outputs);
    weights_.assign(outputs * static_cast<size_t>(stride_), 0);
    pixel_weights_.resize(static_cast<size_t>(most_pixels));
    sample_weights_.resize(static_cast<size_t>(stride_));
    // What is flipped there is flipped before it is sampled, so that an output starts at the other end of its pixels.
    const double middle = 0.5 + (request.flip ? scale - 1 : 0);
    const int begin = sampled ? static_cast<int>(request.begin) : 0;
    const int box_end = static_cast<int>(std::ceil(request.end));
    const int end = sampled ? std::min(box_end, request.pixels) : request.pixels;
    lowest_ = request.samples;
    highest_ = 0;

    for (int i = 0; i < size_; ++i) {
        // As Pillow: pixels whose centres lie within the support, weighted by their distance from the output's centre.
        const double centre = request.begin + (sampled ? i * scale + middle : (i + 0.5) * scale);
        const int from = std::min(std::max(static_cast<int>(centre - support + 0.5), begin), end - 1);
        const int to = std::max(std::min(static_cast<int>(centre + support + 0.5), end), from + 1);
        const int pixels = std::min(to - from, most_pixels);
        double total = 0;
        for (int t = 0; t < pixels; ++t) {
            const double weight = weight_at(request.filter, (from + t - centre + 0.5) / unit);
            pixel_weights_[static_cast<size_t>(t)] = weight;
            total += weight;
        }
        if (total <= 0) pixel_weights_[0] = total = 1;

        // Each pixel's weight goes to the samples it is made of.
        const int last_sample = request.samples - 1;
        const int lowest = std::min(std::max(from / request.ratio - 1, 0), last_sample);
        std::fill(sample_weights_.begin(), sample_weights_.end(), 0.0);
        const auto give = [&](int sample, double weight) {
            sample_weights_[static_cast<size_t>(std::min(std::max(sample, 0), last_sample) - lowest)] += weight;
        };
        for (int t = 0; t < pixels; ++t) {
            const int pixel = from + t, sample = pixel / request.ratio;
            const double weight = pixel_weights_[static_cast<size_t>(t)];
            if (request.smooth) {  // three parts the sample it lies in, one part the nearer neighbour
                give(sample, 0.75 * weight);
                give(pixel % 2 == 0 ? sample - 1 : sample + 1, 0.25 * weight);
            } else {
                give(sample, weight);
            }
        }

        // To integers that add up exactly: the difference of rounded running sums.
        int skipped = 0, count = stride_;
        while (skipped < stride_ - 1 && sample_weights_[static_cast<size_t>(skipped)] == 0) ++skipped;
        while (count > skipped + 1 && sample_weights_[static_cast<size_t>(count - 1)] == 0) --count;
        const size_t output = static_cast<size_t>(request.flip ? size_ - 1 - i : i);
        int16_t* weights = &weights_[output * static_cast<size_t>(stride_)];
        double running = 0;
        int given = 0;
        for (int t = skipped; t < count; ++t) {
            running += sample_weights_[static_cast<size_t>(t)];
            const int so_far = static_cast<int>(std::floor(running / total * request.one + 0.5));
            *weights++ = static_cast<int16_t>(std::min(so_far - given, INT16_MAX));
            given = so_far;
        }
        first_[output] = lowest + skipped;
        count_[output] = count - skipped;
        lowest_ = std::min(lowest_, lowest + skipped);
        highest_ = std::max(highest_, lowest + count);
    }
    return true;
}

AxisView Axis::view(int origin) {
    for (int32_t& first : first_) first -= origin;
    // Seven fractional bits in bicubic, so that overshoot is limited here and not by the range of the numbers.
    const bool limited = filter_ == Filter::bicubic;
    const int16_t low = limited ? -128 * 128 : INT16_MIN, high = limited ? 127 * 128 : INT16_MAX;
    return {first_.data(), count_.data(), weights_.data(), stride_, size_, low, high, limited ? 1 : 0};
}

}  // namespace falconet
