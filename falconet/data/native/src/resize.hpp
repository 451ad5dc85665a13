// Resizing a plane across, then down, in 16-bit fixed point. Weights add up to one, and where some are negative there is
// a bit for the overshoot, so that nothing overflows; each product is rounded, which costs a few thousandths of a level.
#pragma once
#include <algorithm>

#include "idct.hpp"
#include "kernels.hpp"

namespace falconet {
namespace {

#if defined(__AVX2__)

inline void resize_across(const int8_t* plane, ptrdiff_t stride, const AxisView& axis, int rows, int16_t* out) {
    const __m256i zero = _mm256_setzero_si256();
    const __m256i least = _mm256_set1_epi16(axis.low), most = _mm256_set1_epi16(axis.high);
    const auto limited = [&](__m256i sums) { return _mm256_max_epi16(_mm256_min_epi16(sums, most), least); };
    for (int i = 0; i < axis.size; ++i, out += rows) {
        const int16_t* weights = axis.weights + static_cast<ptrdiff_t>(i) * axis.stride;
        const int8_t* column = plane + axis.first[i] * stride;
        const int count = axis.count[i];
        for (int y = 0; y < rows; y += 32) {
            __m256i low = zero, high = zero;
            const int8_t* in = column + y;
            for (int t = 0; t < count; ++t, in += stride) {
                // Pixels become the upper bytes of 16-bit numbers: 8 fractional bits.
                const __m256i bytes =
                    _mm256_permute4x64_epi64(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(in)), 0xD8);
                const __m256i weight = _mm256_set1_epi16(weights[t]);
                low = _mm256_adds_epi16(low, _mm256_mulhrs_epi16(_mm256_unpacklo_epi8(zero, bytes), weight));
                high = _mm256_adds_epi16(high, _mm256_mulhrs_epi16(_mm256_unpackhi_epi8(zero, bytes), weight));
            }
            _mm256_store_si256(reinterpret_cast<__m256i*>(out + y), limited(low));
            _mm256_store_si256(reinterpret_cast<__m256i*>(out + y + 16), limited(high));
        }
    }
}

inline void transpose(const int16_t* in, int columns, int rows, int16_t* out) {
    for (int x = 0; x < columns; x += 8) {
        for (int y = 0; y < rows; y += 16) {
            __m256i r[8];
            for (int i = 0; i < 8; ++i)
                r[i] =
                    _mm256_load_si256(reinterpret_cast<const __m256i*>(in + static_cast<ptrdiff_t>(x + i) * rows + y));
            transpose8(r);
            for (int i = 0; i < 8; ++i) {
                int16_t* to = out + static_cast<ptrdiff_t>(y + i) * columns + x;
                _mm_store_si128(reinterpret_cast<__m128i*>(to), _mm256_castsi256_si128(r[i]));
                _mm_store_si128(reinterpret_cast<__m128i*>(to + static_cast<ptrdiff_t>(8) * columns),
                                _mm256_extracti128_si256(r[i], 1));
            }
        }
    }
}

// `groups` times 16 columns of one output row: kept in registers while the input rows pass.
template <int groups>
FALCONET_INLINE void add_rows(const int16_t* in, int width, const int16_t* weights, int count, __m128i doublings,
                              int16_t* out) {
    __m256i sums[groups];
    for (int g = 0; g < groups; ++g) sums[g] = _mm256_setzero_si256();
    for (int t = 0; t < count; ++t, in += width) {
        const __m256i weight = _mm256_set1_epi16(weights[t]);
        for (int g = 0; g < groups; ++g) {
            const __m256i row = _mm256_load_si256(reinterpret_cast<const __m256i*>(in + 16 * g));
            sums[g] = _mm256_adds_epi16(sums[g], _mm256_mulhrs_epi16(row, weight));
        }
    }
    for (int g = 0; g < groups; ++g)
        _mm256_store_si256(reinterpret_cast<__m256i*>(out + 16 * g), _mm256_sll_epi16(sums[g], doublings));
}

inline void resize_down_row(const int16_t* in, int width, const AxisView& axis, int row, int16_t* out) {
    const int16_t* weights = axis.weights + static_cast<ptrdiff_t>(row) * axis.stride;
    const int16_t* rows = in + static_cast<ptrdiff_t>(axis.first[row]) * width;
    const __m128i doublings = _mm_cvtsi32_si128(axis.doublings);
    int x = 0;
    for (; width - x >= 112; x += 112) add_rows<7>(rows + x, width, weights, axis.count[row], doublings, out + x);
    for (; x < width; x += 16) add_rows<1>(rows + x, width, weights, axis.count[row], doublings, out + x);
}

#else

// What _mm256_mulhrs_epi16 and _mm256_adds_epi16 do: a product rounded to its upper bits; a sum that stops at the
// limits.
FALCONET_INLINE int32_t rounded_product(int32_t a, int32_t b) { return (a * b + (1 << 14)) >> 15; }

inline void resize_across(const int8_t* plane, ptrdiff_t stride, const AxisView& axis, int rows, int16_t* out) {
    for (int i = 0; i < axis.size; ++i, out += rows) {
        const int16_t* weights = axis.weights + static_cast<ptrdiff_t>(i) * axis.stride;
        const int8_t* in = plane + axis.first[i] * stride;
        for (int y = 0; y < rows; ++y) out[y] = 0;
        for (int t = 0; t < axis.count[i]; ++t, in += stride)
            for (int y = 0; y < rows; ++y) out[y] = saturated16(out[y] + rounded_product(in[y] * 256, weights[t]));
        for (int y = 0; y < rows; ++y) out[y] = std::max(std::min(out[y], axis.high), axis.low);
    }
}

inline void transpose(const int16_t* in, int columns, int rows, int16_t* out) {
    for (int x = 0; x < columns; x += 8)  // in strips: a cache line of the output is filled before the next
        for (int y = 0; y < rows; ++y)
            for (int i = 0; i < 8; ++i)
                out[static_cast<ptrdiff_t>(y) * columns + x + i] = in[static_cast<ptrdiff_t>(x + i) * rows + y];
}

inline void resize_down_row(const int16_t* in, int width, const AxisView& axis, int row, int16_t* out) {
    const int16_t* weights = axis.weights + static_cast<ptrdiff_t>(row) * axis.stride;
    const int16_t* from = in + static_cast<ptrdiff_t>(axis.first[row]) * width;
    for (int x = 0; x < width; ++x) out[x] = 0;
    for (int t = 0; t < axis.count[row]; ++t, from += width)
        for (int x = 0; x < width; ++x) out[x] = saturated16(out[x] + rounded_product(from[x], weights[t]));
    for (int x = 0; x < width; ++x) out[x] = static_cast<int16_t>(out[x] * (1 << axis.doublings));
}

#endif

}  // namespace
}  // namespace falconet
