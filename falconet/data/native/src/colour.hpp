// Rows of Y, Cb, Cr (value - 128, 7 fractional bits) to RGB bytes in the batch.
#pragma once
#include "resize.hpp"

namespace falconet {
namespace {

// JFIF's constants as 15-bit fractions; the whole part of 1.402 and 1.772 is added apart, for they must be below one.
constexpr int16_t red_from_cr = 13173, blue_from_cb = 25297;     // 0.402, 0.772
constexpr int16_t green_from_cb = 11277, green_from_cr = 23401;  // 0.344136, 0.714136

#if defined(__AVX2__)

// 32 numbers to bytes, in order: rounded, limited, 128 added back.
FALCONET_INLINE __m256i bytes_of(__m256i a, __m256i b) {
    const __m256i half = _mm256_set1_epi16(64);
    a = _mm256_srai_epi16(_mm256_adds_epi16(a, half), 7);
    b = _mm256_srai_epi16(_mm256_adds_epi16(b, half), 7);
    const __m256i packed = _mm256_xor_si256(_mm256_packs_epi16(a, b), _mm256_set1_epi8(INT8_MIN));
    return _mm256_permute4x64_epi64(packed, 0xD8);
}

// 16 pixels of three colours, interleaved: each of the three stores takes some bytes of each colour.
FALCONET_INLINE void store_interleaved(uint8_t* out, __m128i r, __m128i g, __m128i b) {
    const __m128i r0 = _mm_setr_epi8(0, -1, -1, 1, -1, -1, 2, -1, -1, 3, -1, -1, 4, -1, -1, 5);
    const __m128i g0 = _mm_setr_epi8(-1, 0, -1, -1, 1, -1, -1, 2, -1, -1, 3, -1, -1, 4, -1, -1);
    const __m128i b0 = _mm_setr_epi8(-1, -1, 0, -1, -1, 1, -1, -1, 2, -1, -1, 3, -1, -1, 4, -1);
    const __m128i r1 = _mm_setr_epi8(-1, -1, 6, -1, -1, 7, -1, -1, 8, -1, -1, 9, -1, -1, 10, -1);
    const __m128i g1 = _mm_setr_epi8(5, -1, -1, 6, -1, -1, 7, -1, -1, 8, -1, -1, 9, -1, -1, 10);
    const __m128i b1 = _mm_setr_epi8(-1, 5, -1, -1, 6, -1, -1, 7, -1, -1, 8, -1, -1, 9, -1, -1);
    const __m128i r2 = _mm_setr_epi8(-1, 11, -1, -1, 12, -1, -1, 13, -1, -1, 14, -1, -1, 15, -1, -1);
    const __m128i g2 = _mm_setr_epi8(-1, -1, 11, -1, -1, 12, -1, -1, 13, -1, -1, 14, -1, -1, 15, -1);
    const __m128i b2 = _mm_setr_epi8(10, -1, -1, 11, -1, -1, 12, -1, -1, 13, -1, -1, 14, -1, -1, 15);
    const auto store = [&](int at, __m128i from_r, __m128i from_g, __m128i from_b) {
        const __m128i rg = _mm_or_si128(_mm_shuffle_epi8(r, from_r), _mm_shuffle_epi8(g, from_g));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(out + at), _mm_or_si128(rg, _mm_shuffle_epi8(b, from_b)));
    };
    store(0, r0, g0, b0);
    store(16, r1, g1, b1);
    store(32, r2, g2, b2);
}

// 32 pixels from x on, as three registers of bytes.
FALCONET_INLINE void colours(const int16_t* y, const int16_t* cb, const int16_t* cr, __m256i out[3]) {
    const auto load = [](const int16_t* from) { return _mm256_load_si256(reinterpret_cast<const __m256i*>(from)); };
    const auto part = [](__m256i value, int16_t factor) {
        return _mm256_mulhrs_epi16(value, _mm256_set1_epi16(factor));
    };
    __m256i r[2], g[2], b[2];
    for (int half = 0; half < 2; ++half) {
        const __m256i luma = load(y + 16 * half), blue = load(cb + 16 * half), red = load(cr + 16 * half);
        r[half] = _mm256_adds_epi16(luma, _mm256_adds_epi16(red, part(red, red_from_cr)));
        b[half] = _mm256_adds_epi16(luma, _mm256_adds_epi16(blue, part(blue, blue_from_cb)));
        g[half] = _mm256_subs_epi16(luma, _mm256_adds_epi16(part(blue, green_from_cb), part(red, green_from_cr)));
    }
    out[0] = bytes_of(r[0], r[1]);
    out[1] = bytes_of(g[0], g[1]);
    out[2] = bytes_of(b[0], b[1]);
}

FALCONET_INLINE void store_pixels(const __m256i rgb[3], uint8_t* out, ptrdiff_t plane) {
    if (plane != 0) {
        for (int c = 0; c < 3; ++c) _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + c * plane), rgb[c]);
        return;
    }
    store_interleaved(out, _mm256_castsi256_si128(rgb[0]), _mm256_castsi256_si128(rgb[1]),
                      _mm256_castsi256_si128(rgb[2]));
    store_interleaved(out + 48, _mm256_extracti128_si256(rgb[0], 1), _mm256_extracti128_si256(rgb[1], 1),
                      _mm256_extracti128_si256(rgb[2], 1));
}

#else

FALCONET_INLINE uint8_t byte_of(int32_t value) {
    return static_cast<uint8_t>(saturated8(saturated16(value + 64) >> 7) + 128);
}

#endif

// One row of `size` pixels. `plane`: bytes from one colour to the next, 0 where they are interleaved.
inline void colour_row(const int16_t* y, const int16_t* cb, const int16_t* cr, int size, uint8_t* out,
                       ptrdiff_t plane) {
#if defined(__AVX2__)
    const int step = plane != 0 ? 1 : 3;
    __m256i rgb[3];
    for (int x = 0; x < size; x += 32, out += 32 * step) {
        if (cb != nullptr) colours(y + x, cb + x, cr + x, rgb);
        else
            rgb[0] = rgb[1] = rgb[2] = bytes_of(_mm256_load_si256(reinterpret_cast<const __m256i*>(y + x)),
                                                _mm256_load_si256(reinterpret_cast<const __m256i*>(y + x + 16)));
        if (size - x >= 32) {
            store_pixels(rgb, out, plane);
            continue;
        }
        uint8_t tail[96];  // the row ends inside the vector: by way of here, so that nothing after it is written
        store_pixels(rgb, tail, plane != 0 ? 32 : 0);
        const size_t left = static_cast<size_t>(size - x);
        if (plane == 0) std::memcpy(out, tail, 3 * left);
        else
            for (int c = 0; c < 3; ++c) std::memcpy(out + c * plane, tail + 32 * c, left);
    }
#else
    const ptrdiff_t pixel = plane != 0 ? 1 : 3, channel = plane != 0 ? plane : 1;
    for (int x = 0; x < size; ++x, out += pixel) {
        int32_t r = y[x], g = y[x], b = y[x];
        if (cb != nullptr) {
            r = saturated16(y[x] + saturated16(cr[x] + rounded_product(cr[x], red_from_cr)));
            b = saturated16(y[x] + saturated16(cb[x] + rounded_product(cb[x], blue_from_cb)));
            g = saturated16(y[x] -
                            saturated16(rounded_product(cb[x], green_from_cb) + rounded_product(cr[x], green_from_cr)));
        }
        out[0] = byte_of(r);
        out[channel] = byte_of(g);
        out[2 * channel] = byte_of(b);
    }
#endif
}

void finish(const Picture& picture) {
    const ptrdiff_t size = picture.size;
    const ptrdiff_t row_bytes = picture.planar ? size : 3 * size, plane = picture.planar ? size * size : 0;
    int16_t* rows[3] = {picture.rows, picture.rows + picture.padded, picture.rows + 2 * picture.padded};
    const bool grey = picture.components == 1;
    for (int y = 0; y < picture.size; ++y) {
        for (int c = 0; c < picture.components; ++c)
            resize_down_row(picture.columns[c], picture.padded, picture.down[c], y, rows[c]);
        colour_row(rows[0], grey ? nullptr : rows[1], grey ? nullptr : rows[2], picture.size,
                   picture.out + y * row_bytes, plane);
    }
}

}  // namespace
}  // namespace falconet
