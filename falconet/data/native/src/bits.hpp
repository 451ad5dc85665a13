// Reading a bit stream 64 bits at a time, and taking the stuffed zero bytes out of it first.
// Everything in this file is private to the file that includes it: target.cpp is compiled for several processors.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#define FALCONET_INLINE inline __attribute__((always_inline))
#define FALCONET_LIKELY(x) __builtin_expect(!!(x), 1)
#define FALCONET_UNLIKELY(x) __builtin_expect(!!(x), 0)

namespace falconet {
namespace {

// The next bits are at the top of `window`. Only the low six bits of `count` have a meaning: how many of them are
// certain (0..63). The rest of the window holds true bits as well or zeros, so that or-ing them in again is harmless.
// A refill never looks at the end: the caller pads the stream and looks at `next` after every MCU.
struct BitReader {
    uint64_t window, count;
    const uint8_t* next;
};

FALCONET_INLINE uint64_t big_endian_word(const uint8_t* bytes) {
    uint64_t word;
    std::memcpy(&word, bytes, sizeof word);
#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
    word = __builtin_bswap64(word);
#endif
    return word;
}

// At least 56 bits afterwards. Issued between a table look-up and the use of its result, it costs nothing.
FALCONET_INLINE void refill(BitReader& in) {
    in.window |= big_endian_word(in.next) >> (in.count & 63);
    in.next += (~in.count >> 3) & 7;
    in.count |= 56;
}

// `bits` modulo 64: a table entry is passed whole.
FALCONET_INLINE void drop(BitReader& in, uint64_t bits) {
    in.window <<= bits & 63;
    in.count -= bits;
}

FALCONET_INLINE BitReader begin_bits(const uint8_t* bytes) {
    BitReader in{0, 0, bytes};
    refill(in);
    return in;
}

// Bits used up since `begin`.
FALCONET_INLINE uint64_t used_bits(const BitReader& in, const uint8_t* begin) {
    return static_cast<uint64_t>(in.next - begin) * 8 - (in.count & 63);
}

// Copies entropy-coded bytes without their stuffing (FF 00 is FF) up to the first marker or `end`.
// Returns the end of the copy; `in` is left at the FF of the marker, or at `end`. `out` has room for 32 bytes more.
inline uint8_t* unstuff(const uint8_t*& in, const uint8_t* end, uint8_t* out) {
    const uint8_t* from = in;
    for (;;) {
#if defined(__AVX2__)
        const __m256i all_ones = _mm256_set1_epi8(-1);
        uint32_t found = 0;
        while (end - from >= 32) {
            const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
            _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), bytes);
            found = static_cast<uint32_t>(_mm256_movemask_epi8(_mm256_cmpeq_epi8(bytes, all_ones)));
            const int plain = found != 0 ? __builtin_ctz(found) : 32;
            from += plain;
            out += plain;
            if (found != 0) break;
        }
        if (found == 0)
            while (from < end && *from != 0xFF) *out++ = *from++;
#else
        const size_t left = static_cast<size_t>(end - from);
        const void* found = left != 0 ? std::memchr(from, 0xFF, left) : nullptr;
        const size_t plain = found != nullptr ? static_cast<size_t>(static_cast<const uint8_t*>(found) - from) : left;
        std::memcpy(out, from, plain);
        from += plain;
        out += plain;
#endif
        if (end - from < 2) {  // nothing left, or an FF with nothing after it
            from = end;
            break;
        }
        if (from[1] == 0) {
            *out++ = 0xFF;
            from += 2;
        } else if (from[1] == 0xFF) {
            ++from;  // a fill byte
        } else {
            break;
        }
    }
    in = from;
    return out;
}

}  // namespace
}  // namespace falconet
