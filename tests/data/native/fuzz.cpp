// What hostile bytes may not do to the decoder and the transcoder, for libFuzzer or for the driver in fuzz_driver.cpp.
//
// Beyond what the sanitizers watch: both kinds of inner loops give the same status and the same pixels, what one crop
// refuses for its header every crop refuses, and what the transcoder writes decodes to the very same pixels.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "decode.hpp"
#include "transcode.hpp"

using falconet::Decoder;
using falconet::Status;

namespace {

constexpr falconet::Limits limits{1 << 20, 64 << 20};

void insist(bool holds, const char* what) {
    if (holds) return;
    std::fprintf(stderr, "not held: %s\n", what);
    std::abort();
}

// The last bytes of the input choose the crop, so that mutation moves it about.
falconet::Request request_from(const uint8_t* tail, int width, int height) {
    const auto part = [](uint8_t a, uint8_t b, int whole) { return (a * 256 + b) / 65536.0 * whole; };
    double x0 = part(tail[0], tail[1], width), x1 = part(tail[2], tail[3], width);
    double y0 = part(tail[4], tail[5], height), y1 = part(tail[6], tail[7], height);
    if (tail[8] & 1) {  // whole pixels, as a training crop has them
        x0 = static_cast<int>(x0), x1 = static_cast<int>(x1) + 1;
        y0 = static_cast<int>(y0), y1 = static_cast<int>(y1) + 1;
    }
    if (x1 <= x0) std::swap(x0, x1);
    if (y1 <= y0) std::swap(y0, y1);
    return {x0, y0, x1, y1, (tail[8] & 2) != 0, 1 + tail[9] % 70, (tail[8] & 4) != 0};
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    static Decoder portable(falconet::portable::kernels, limits), best(falconet::best_kernels(), limits);
    if (size < 10) return 0;
    // A copy of exactly this size, so that the address sanitizer sees a byte read beyond it.
    const std::vector<uint8_t> bytes(data, data + size);
    int width = 0, height = 0;
    const Status header = portable.measure(bytes.data(), size, width, height);
    const falconet::Request request = request_from(bytes.data() + size - 10, width, height);
    const size_t pixels = static_cast<size_t>(request.size) * static_cast<size_t>(request.size) * 3;
    std::vector<uint8_t> one(pixels, 1), two(pixels, 2), three(pixels, 3);
    const Status first = portable.decode(bytes.data(), size, request, one.data());
    const Status second = best.decode(bytes.data(), size, request, two.data());
    insist(first == second, "both kinds of inner loops give the same status");
    insist(header == Status::ok || first != Status::ok, "an image refused by its header is not decoded");
    if (first == Status::ok) insist(one == two, "both kinds of inner loops give the same pixels");

    std::vector<uint8_t> marked;
    const int interval = 1 + data[size - 1] % 9;
    const Status written = falconet::restart_marked(bytes.data(), size, interval, limits.pixels, marked);
    if (written == Status::ok && first != Status::bad_request && first != Status::too_large &&
        first != Status::unsupported) {
        insist(first == Status::ok, "a whole image that can be written again can be decoded");
        insist(best.decode(marked.data(), marked.size(), request, three.data()) == Status::ok,
               "what was written decodes");
        insist(one == three, "what was written has the same pixels");
    }
    return 0;
}
