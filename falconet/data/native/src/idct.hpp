// The inverse cosine transform of 8 x 8 blocks, bit for bit libjpeg's default one (jidctint, as its vector code does
// it), and reduced ones that make a block 4, 2 or 1 pixels wide or high. Pixels are written column by column, as value
// - 128.
#pragma once
#include "bits.hpp"
#include "entropy.hpp"

namespace falconet {
namespace {

// libjpeg's constants have 13 fractional bits, and it factors the transform to save multiplications. Nothing is rounded
// between its steps, so the same result comes of one small matrix whose entries are the sums of those constants.
constexpr int even_2_to_0 = 4433 + 6270, even_6_to_0 = 4433;
constexpr int even_2_to_1 = 4433, even_6_to_1 = 4433 - 15137;
constexpr int odd[4][4] = {
    // from rows 1, 3, 5, 7
    {12299 - 7373 - 3196 + 9633, 9633, 9633 - 3196, 9633 - 7373},
    {9633, 25172 - 20995 - 16069 + 9633, 9633 - 20995, 9633 - 16069},
    {9633 - 3196, 9633 - 20995, 16819 - 20995 - 3196 + 9633, 9633},
    {9633 - 7373, 9633 - 16069, 9633, 2446 - 7373 - 16069 + 9633},
};
constexpr int first_shift = 11, second_shift = 18;  // two bits more are kept between the passes; 3 are the transform's

FALCONET_INLINE int16_t saturated16(int32_t value) {
    return static_cast<int16_t>(value < INT16_MIN ? INT16_MIN : value > INT16_MAX ? INT16_MAX : value);
}
FALCONET_INLINE int8_t saturated8(int32_t value) {
    return static_cast<int8_t>(value < INT8_MIN ? INT8_MIN : value > INT8_MAX ? INT8_MAX : value);
}
// 16 bits are kept, as in the vector code; an image whose products need more is not one an encoder made.
FALCONET_INLINE int16_t dequantised(int16_t coefficient, int16_t step) {
    return static_cast<int16_t>(static_cast<uint32_t>(coefficient) * static_cast<uint32_t>(step));
}

// A block without detail: all pixels its mean.
FALCONET_INLINE void flat_block(int16_t mean, int16_t step, int8_t* out, ptrdiff_t stride) {
    const uint8_t pixel = static_cast<uint8_t>(saturated8((dequantised(mean, step) + 4) >> 3));
    const uint64_t pixels = 0x0101010101010101u * pixel;
    for (int column = 0; column < 8; ++column) std::memcpy(out + column * stride, &pixels, 8);
}

#if defined(__AVX2__)

struct Wide {  // 16 numbers of 32 bits, in the order that unpacking leaves them in
    __m256i low, high;
};
FALCONET_INLINE __m256i pair(int a, int b) {
    return _mm256_set1_epi32(static_cast<int>(static_cast<uint32_t>(b) << 16 | static_cast<uint16_t>(a)));
}
FALCONET_INLINE Wide both(__m256i a, __m256i b, __m256i factors) {
    return {_mm256_madd_epi16(_mm256_unpacklo_epi16(a, b), factors),
            _mm256_madd_epi16(_mm256_unpackhi_epi16(a, b), factors)};
}
FALCONET_INLINE Wide operator+(Wide a, Wide b) {
    return {_mm256_add_epi32(a.low, b.low), _mm256_add_epi32(a.high, b.high)};
}
FALCONET_INLINE Wide operator-(Wide a, Wide b) {
    return {_mm256_sub_epi32(a.low, b.low), _mm256_sub_epi32(a.high, b.high)};
}
template <int shift>
FALCONET_INLINE __m256i rounded(Wide a) {
    const __m256i half = _mm256_set1_epi32(1 << (shift - 1));
    return _mm256_packs_epi32(_mm256_srai_epi32(_mm256_add_epi32(a.low, half), shift),
                              _mm256_srai_epi32(_mm256_add_epi32(a.high, half), shift));
}

template <int shift>
FALCONET_INLINE void transform(__m256i r[8]) {
    const Wide sum = both(r[0], r[4], pair(8192, 8192)), difference = both(r[0], r[4], pair(8192, -8192));
    const Wide outer = both(r[2], r[6], pair(even_2_to_0, even_6_to_0));
    const Wide inner = both(r[2], r[6], pair(even_2_to_1, even_6_to_1));
    const Wide even[4] = {sum + outer, difference + inner, difference - inner, sum - outer};
    __m256i above[4], below[4];
    for (int i = 0; i < 4; ++i) {
        const Wide odds = both(r[1], r[3], pair(odd[i][0], odd[i][1])) + both(r[5], r[7], pair(odd[i][2], odd[i][3]));
        above[i] = rounded<shift>(even[i] + odds);
        below[i] = rounded<shift>(even[i] - odds);
    }
    for (int i = 0; i < 4; ++i) {
        r[i] = above[i];
        r[7 - i] = below[i];
    }
}

// Each half of the registers holds its own 8 x 8 numbers of 16 bits.
FALCONET_INLINE void transpose8(__m256i r[8]) {
    __m256i a[8], b[8];
    for (int i = 0; i < 4; ++i) {
        a[2 * i] = _mm256_unpacklo_epi16(r[2 * i], r[2 * i + 1]);
        a[2 * i + 1] = _mm256_unpackhi_epi16(r[2 * i], r[2 * i + 1]);
    }
    for (int i = 0; i < 2; ++i) {
        b[4 * i + 0] = _mm256_unpacklo_epi32(a[4 * i], a[4 * i + 2]);
        b[4 * i + 1] = _mm256_unpackhi_epi32(a[4 * i], a[4 * i + 2]);
        b[4 * i + 2] = _mm256_unpacklo_epi32(a[4 * i + 1], a[4 * i + 3]);
        b[4 * i + 3] = _mm256_unpackhi_epi32(a[4 * i + 1], a[4 * i + 3]);
    }
    for (int i = 0; i < 4; ++i) {
        r[2 * i] = _mm256_unpacklo_epi64(b[i], b[i + 4]);
        r[2 * i + 1] = _mm256_unpackhi_epi64(b[i], b[i + 4]);
    }
}

// Two blocks at once, block_slots apart; both are left full of zeros for the next two.
inline void full_blocks(int16_t* blocks, const int16_t* quant, int8_t* first, int8_t* second, ptrdiff_t stride) {
    __m256i r[8];
    const __m256i zero = _mm256_setzero_si256();
    for (int i = 0; i < 8; ++i) {
        __m128i* a = reinterpret_cast<__m128i*>(blocks + 8 * i);
        __m128i* b = reinterpret_cast<__m128i*>(blocks + block_slots + 8 * i);
        const __m128i steps = _mm_load_si128(reinterpret_cast<const __m128i*>(quant + 8 * i));
        const __m256i rows = _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_load_si128(a)), _mm_load_si128(b), 1);
        r[i] = _mm256_mullo_epi16(rows, _mm256_broadcastsi128_si256(steps));
        _mm_store_si128(a, _mm256_castsi256_si128(zero));
        _mm_store_si128(b, _mm256_castsi256_si128(zero));
    }
    transform<first_shift>(r);
    transpose8(r);
    transform<second_shift>(r);  // r[x]: the pixels of column x, from top to bottom
    for (int i = 0; i < 4; ++i) {
        const __m256i bytes = _mm256_packs_epi16(r[2 * i], r[2 * i + 1]);
        const __m128i a = _mm256_castsi256_si128(bytes), b = _mm256_extracti128_si256(bytes, 1);
        int8_t* columns[4] = {first + 2 * i * stride, first + (2 * i + 1) * stride, second + 2 * i * stride,
                              second + (2 * i + 1) * stride};
        _mm_storel_epi64(reinterpret_cast<__m128i*>(columns[0]), a);
        _mm_storeh_pd(reinterpret_cast<double*>(columns[1]), _mm_castsi128_pd(a));
        _mm_storel_epi64(reinterpret_cast<__m128i*>(columns[2]), b);
        _mm_storeh_pd(reinterpret_cast<double*>(columns[3]), _mm_castsi128_pd(b));
    }
}

#else

// Eight numbers `step` apart become eight numbers one after the other.
template <int shift>
FALCONET_INLINE void transform(const int16_t* in, int step, int16_t out[8]) {
    const int32_t sum = 8192 * (in[0] + in[4 * step]), difference = 8192 * (in[0] - in[4 * step]);
    const int32_t outer = even_2_to_0 * in[2 * step] + even_6_to_0 * in[6 * step];
    const int32_t inner = even_2_to_1 * in[2 * step] + even_6_to_1 * in[6 * step];
    const int32_t even[4] = {sum + outer, difference + inner, difference - inner, sum - outer};
    constexpr int32_t half = 1 << (shift - 1);
    for (int i = 0; i < 4; ++i) {
        const int32_t odds =
            odd[i][0] * in[step] + odd[i][1] * in[3 * step] + odd[i][2] * in[5 * step] + odd[i][3] * in[7 * step];
        out[i] = saturated16((even[i] + odds + half) >> shift);
        out[7 - i] = saturated16((even[i] - odds + half) >> shift);
    }
}

inline void full_block(int16_t* block, const int16_t* quant, int8_t* out, ptrdiff_t stride) {
    int16_t columns[8][8], pixels[8];
    for (int i = 0; i < 64; ++i) block[i] = dequantised(block[i], quant[i]);
    for (int x = 0; x < 8; ++x) transform<first_shift>(block + x, 8, columns[x]);
    for (int y = 0; y < 8; ++y) {
        transform<second_shift>(&columns[0][y], 8, pixels);
        for (int x = 0; x < 8; ++x) out[x * stride + y] = saturated8(pixels[x]);
    }
    std::memset(block, 0, 64 * sizeof *block);
}

inline void full_blocks(int16_t* blocks, const int16_t* quant, int8_t* first, int8_t* second, ptrdiff_t stride) {
    full_block(blocks, quant, first, stride);
    full_block(blocks + block_slots, quant, second, stride);
}

#endif

// The basis of the transform with `side` points, 13 fractional bits: row by pixel, column by frequency.
template <int side>
struct Basis;
template <>
struct Basis<1> {
    static constexpr int32_t at[1][1] = {{8192}};
};
template <>
struct Basis<2> {
    static constexpr int32_t at[2][2] = {{8192, 8192}, {8192, -8192}};
};
template <>
struct Basis<4> {
    static constexpr int32_t at[4][4] = {{8192, 10703, 8192, 4433},
                                         {8192, 4433, -8192, -10703},
                                         {8192, -4433, -8192, 10703},
                                         {8192, -10703, 8192, -4433}};
};
template <>
struct Basis<8> {
    static constexpr int32_t at[8][8] = {
        {8192, 11363, 10703, 9633, 8192, 6437, 4433, 2260},     {8192, 9633, 4433, -2260, -8192, -11363, -10703, -6437},
        {8192, 6437, -4433, -11363, -8192, 2260, 10703, 9633},  {8192, 2260, -10703, -6437, 8192, 9633, -4433, -11363},
        {8192, -2260, -10703, 6437, 8192, -9633, -4433, 11363}, {8192, -6437, -4433, 11363, -8192, -2260, 10703, -9633},
        {8192, -9633, 4433, 2260, -8192, 11363, -10703, 6437},  {8192, -11363, 10703, -9633, 8192, -6437, 4433, -2260}};
};

// A block reduced to `wide` x `high` pixels: its lowest frequencies, transformed with as many points.
template <int wide, int high>
inline void reduced_block(const int16_t* block, const int16_t* quant, int8_t* out, ptrdiff_t stride) {
    // Written so that a compiler makes vectors of the inner loops: all columns at once, then all rows at once.
    int32_t between[wide][high];
    for (int y = 0; y < high; ++y) {
        int32_t sums[wide] = {};
        for (int v = 0; v < high; ++v)
            for (int x = 0; x < wide; ++x)
                sums[x] += Basis<high>::at[y][v] * dequantised(block[8 * v + x], quant[8 * v + x]);
        for (int x = 0; x < wide; ++x) between[x][y] = saturated16((sums[x] + (1 << (first_shift - 1))) >> first_shift);
    }
    for (int x = 0; x < wide; ++x) {
        int32_t sums[high] = {};
        for (int u = 0; u < wide; ++u)
            for (int y = 0; y < high; ++y) sums[y] += Basis<wide>::at[x][u] * between[u][y];
        for (int y = 0; y < high; ++y)
            out[x * stride + y] = saturated8((sums[y] + (1 << (second_shift - 1))) >> second_shift);
    }
}

template <int wide>
inline void reduced_block(const int16_t* block, const int16_t* quant, int high, int8_t* out, ptrdiff_t stride) {
    switch (high) {
        case 8: return reduced_block<wide, 8>(block, quant, out, stride);
        case 4: return reduced_block<wide, 4>(block, quant, out, stride);
        case 2: return reduced_block<wide, 2>(block, quant, out, stride);
        default: return reduced_block<wide, 1>(block, quant, out, stride);
    }
}

// Leaves the block full of zeros for the next one.
inline void reduced_block(int16_t* block, const int16_t* quant, int wide, int high, int8_t* out, ptrdiff_t stride) {
    switch (wide) {
        case 8: reduced_block<8>(block, quant, high, out, stride); break;
        case 4: reduced_block<4>(block, quant, high, out, stride); break;
        case 2: reduced_block<2>(block, quant, high, out, stride); break;
        default: reduced_block<1>(block, quant, high, out, stride); break;
    }
    std::memset(block, 0, 64 * sizeof *block);
}

}  // namespace
}  // namespace falconet
