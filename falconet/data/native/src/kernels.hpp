// The inner loops, compiled once for any processor and once for AVX2, and chosen when the library is loaded.
// target.cpp holds them; both versions give the same bytes.
#pragma once
#include <cstddef>
#include <cstdint>

#include "huffman.hpp"
#include "status.hpp"

namespace falconet {

// A component of the scan and where its pixels go. A plane is stored sideways, column after column, because the blocks
// come out of the transform that way and the first resize runs down the columns; pixels are value - 128.
struct ScanComponent {
    const HuffmanTable* dc;
    const HuffmanTable* ac;
    const int16_t* quant;
    int across, down;      // blocks in an MCU
    int wide, high;        // pixels a block is decoded to: 8, or 4, 2, 1 of a picture that is much larger than the output
    uint64_t last_needed;  // zig-zag position of the highest frequency among those
    int8_t* plane;
    ptrdiff_t stride;  // from one column to the next
    int8_t* spare;     // 8 columns for the second block where there is no second one
};

// Which MCUs of an entropy-coded scan are needed: columns x0 to x1, rows y0 to y1.
struct Scan {
    const uint8_t* data;     // what follows the SOS marker
    const uint8_t* end;      // of the file
    const size_t* restarts;  // where each restart interval starts, relative to data, and where the last one ends
    int restart_interval;    // MCUs; 0: none, and no `restarts`
    int components;
    ScanComponent component[3];
    int mcus_across, mcus_down;
    int x0, x1, y0, y1;
    uint8_t* clean;  // room for end - data bytes and clean_padding more
};

// The weights of one axis: output i is the sum over t < count[i] of weights[i * stride + t] * input[first[i] + t].
struct AxisView {
    const int32_t* first;
    const int32_t* count;
    const int16_t* weights;
    int stride;
    int size;           // outputs
    int16_t low, high;  // limits after the first resize: Pillow stores bytes there
    int doublings;      // after the second resize: 1 where the first left a bit for overshoot
};

struct Picture {
    int components;
    const int16_t* columns[3];  // resized across: rows x padded, 8 fractional bits
    AxisView down[3];
    int size;       // of the output, both ways
    int padded;     // the same, rounded up to whole vectors
    int16_t* rows;  // room for 3 x padded
    uint8_t* out;
    bool planar;  // 3 x size x size instead of size x size x 3
};

constexpr int vector_pixels = 32;       // rows and columns are padded to a multiple of this
constexpr size_t clean_padding = 4096;  // an MCU takes at most 10 blocks x 64 symbols x 31 bits = 2,480 bytes
constexpr size_t clean_zeros = 64;      // of those; the rest may be anything

struct Kernels {
    const char* name;
    Status (*decode)(const Scan& scan);
    // A sideways plane resized across: size x rows, rows a multiple of vector_pixels.
    void (*resize_across)(const int8_t* plane, ptrdiff_t stride, const AxisView& axis, int rows, int16_t* out);
    // columns x rows -> rows x columns; columns a multiple of 8, rows of 16.
    void (*transpose)(const int16_t* in, int columns, int rows, int16_t* out);
    // Resized down, converted to RGB and written to the batch.
    void (*finish)(const Picture& picture);
};

namespace portable {
extern const Kernels kernels;
}
#if defined(__x86_64__)
namespace avx2 {
extern const Kernels kernels;
}
#endif

inline const Kernels& best_kernels() {
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2"))
        return avx2::kernels;
#endif
    return portable::kernels;
}

}  // namespace falconet
