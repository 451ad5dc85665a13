// Huffman-coded blocks: decoding one, and passing over one whose values nobody needs.
#pragma once
#include "bits.hpp"
#include "huffman.hpp"
#include "zigzag.hpp"

namespace falconet {
namespace {

constexpr int block_slots = 80;  // 64 coefficients, the spare slot, and padding that keeps the next block aligned

// The value behind a code, from the window as it was before the code was dropped; 0 where it has no bits. The lower
// half of the raw values, which begin with a 0, are negative. Without a branch, and beside the way to the next code.
FALCONET_INLINE int value_of(uint32_t entry, uint64_t window) {
    const uint64_t behind = window << (entry >> 16 & 63);
    const uint32_t rest = entry >> 24;
    const uint64_t raw = behind >> 1 >> rest, most = ~uint64_t{0} >> 1 >> rest;
    const uint64_t negative = static_cast<uint64_t>(static_cast<int64_t>(~behind) >> 63);
    return static_cast<int>(raw - (most & negative));
}

// The entry of a code longer than the index, as the table would have it; an invalid code moves to where blocks end
// badly.
__attribute__((noinline)) uint32_t long_code(const HuffmanTable& table, uint64_t window) {
    for (int length = code_bits + 1; length <= 16; ++length) {
        const int code = static_cast<int>(window >> (64 - length));
        if (code > table.last_code[length]) continue;
        const int place = code + table.offset[length];
        if (place < 0 || place >= table.size) break;
        const int symbol = table.symbols[place];
        const uint32_t bits = symbol & 15u, own = static_cast<uint32_t>(length);
        return (own + bits) | advance(symbol) << 8 | own << 16 | (63 - bits) << 24;
    }
    return incomplete | 1 | invalid_code << 8 | 63u << 24;
}

// The next code's entry, and a whole window behind its code. Every symbol is followed by a refill and takes at most
// 31 of the window's 64 bits, so that enough are left to look the next one up before that refill.
FALCONET_INLINE uint32_t next_code(const HuffmanTable& table, BitReader& in) {
    const uint32_t entry = table.fast[in.window >> (64 - code_bits)];
    refill(in);
    return FALCONET_LIKELY((entry & incomplete) == 0) ? entry : long_code(table, in.window);
}

// The difference to the last block's mean; `valid` becomes false at a code that does not exist.
FALCONET_INLINE int dc_difference(const HuffmanTable& table, BitReader& in, bool& valid) {
    const uint32_t entry = next_code(table, in);
    if (FALCONET_UNLIKELY((entry & incomplete) != 0)) valid = false;
    const int value = value_of(entry, in.window);
    drop(in, entry);
    return value;
}

FALCONET_INLINE void ac_symbol(const HuffmanTable& table, BitReader& in, uint64_t& position, int16_t* block) {
    const uint32_t entry = next_code(table, in);
    position += entry >> 8 & 255;
    block[zig_zag.place[position]] = static_cast<int16_t>(value_of(entry, in.window));
    drop(in, entry);
}

FALCONET_INLINE bool ended_well(uint64_t position) { return position == 63 || position >= end_of_block; }

// Coefficients 1 to 63 into a block of zeros; the position it ended at, see huffman.hpp. The plainest loop is the
// fastest: unrolled, or with two symbols a look-up, it was 5 to 10 % slower.
FALCONET_INLINE uint64_t ac_block(const HuffmanTable& table, BitReader& in, int16_t* block) {
    uint64_t position = 0;
    do ac_symbol(table, in, position, block);
    while (position < 63);
    return position;
}

// The rest of a block from `position` on, which is inside it, without its values.
FALCONET_INLINE uint64_t skip_block(const HuffmanTable& table, BitReader& in, uint64_t position = 0) {
    do {
        const uint64_t several = table.skip[in.window >> (64 - skip_bits)];
        refill(in);
        // The last of the symbols has to begin inside the block; else they are taken one by one.
        if (FALCONET_LIKELY((several & incomplete) == 0 && position + (several >> 16 & 255) < 63)) {
            drop(in, several);
            position += several >> 8 & 255;
        } else {
            const uint32_t entry = next_code(table, in);
            drop(in, entry);
            position += entry >> 8 & 255;
        }
    } while (position < 63);
    return position;
}

// The coefficients up to zig-zag position `last`; the rest is passed over.
FALCONET_INLINE uint64_t ac_block_until(const HuffmanTable& table, BitReader& in, uint64_t last, int16_t* block) {
    uint64_t position = 0;
    while (position < last) ac_symbol(table, in, position, block);
    return position < 63 ? skip_block(table, in, position) : position;
}

}  // namespace
}  // namespace falconet
