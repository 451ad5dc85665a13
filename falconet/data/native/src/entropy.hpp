// Huffman-coded blocks: decoding one, and skipping one whose values are not needed.
#pragma once
#include "bits.hpp"
#include "huffman.hpp"
#include "zigzag.hpp"

namespace falconet {
namespace {

constexpr int block_slots = 80;  // 64 coefficients, the spare slot, and padding that keeps the next block aligned

// The value of an entry, from the window as it was before the code was dropped; the low 16 bits mean something.
FALCONET_INLINE uint64_t value_of(Entry entry, uint64_t window) {
#if defined(__BMI__)
    const uint64_t raw = __bextr_u64(window, entry >> 16);
#else
    const uint64_t raw = window >> (entry >> 16 & 63) & ((uint64_t{1} << (entry >> 24 & 63)) - 1);
#endif
    return raw + (entry >> 32);
}

// The entry that the table has no room for, by comparing with the last code of each length; an invalid code moves to
// where blocks end badly.
__attribute__((noinline)) Entry long_code(const HuffmanTable& table, uint64_t window, int from_length) {
    for (int length = from_length; length <= 16; ++length) {
        const int code = static_cast<int>(window >> (64 - length));
        if (code > table.last_code[length]) continue;
        const int place = code + table.offset[length];
        if (place < 0 || place >= table.size) break;
        const int symbol = table.symbols[place];
        const bool negative = (symbol & 15) != 0 && (window >> (63 - length) & 1) == 0;
        return entry_of(symbol, length, advance(symbol), negative);
    }
    return entry_of(0, 1, invalid_code, false) | incomplete;
}

// The next code's entry, and a full window after its code. Every symbol is followed by a refill and takes at most
// 31 of the window's bits, so that enough are left to look the next one up before that refill, whose work is then done
// in the time the table takes to answer.
template <int index_bits>
FALCONET_INLINE Entry next_code(const HuffmanTable& table, BitReader& in) {
    const Entry entry = table.fast[in.window >> (64 - index_bits)];
    refill(in);
    return FALCONET_LIKELY((entry & incomplete) == 0) ? entry : long_code(table, in.window, index_bits);
}

// The difference to the last block's mean; `valid` becomes false at a code that does not exist.
FALCONET_INLINE int dc_difference(const HuffmanTable& table, BitReader& in, bool& valid) {
    const Entry entry = next_code<dc_bits>(table, in);
    if (FALCONET_UNLIKELY((entry & incomplete) != 0)) valid = false;
    const int value = static_cast<int16_t>(value_of(entry, in.window));
    drop(in, entry);
    return value;
}

FALCONET_INLINE void ac_symbol(const HuffmanTable& table, BitReader& in, uint64_t& position, int16_t* block) {
    const Entry entry = next_code<ac_bits>(table, in);
    position += entry >> 56;
    block[zig_zag.place[position]] = static_cast<int16_t>(value_of(entry, in.window));
    drop(in, entry);
}

FALCONET_INLINE bool ended_well(uint64_t position) { return position == 63 || position >= end_of_block; }

// Coefficients 1 to 63 into a block of zeros; the position it ended at, see huffman.hpp. Most of the time goes here: a
// symbol takes 10 cycles, of which 7 are the way from one look-up to the next.
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
        if (FALCONET_LIKELY(position + (several >> 16) < 63)) {
            drop(in, several);
            position += several >> 8 & 255;
        } else {
            const Entry entry = next_code<ac_bits>(table, in);
            drop(in, entry);
            position += entry >> 56;
        }
    } while (position < 63);
    return position;
}

// The coefficients up to zig-zag position `last`; the rest is skipped.
FALCONET_INLINE uint64_t ac_block_until(const HuffmanTable& table, BitReader& in, uint64_t last, int16_t* block) {
    uint64_t position = 0;
    while (position < last) ac_symbol(table, in, position, block);
    return position < 63 ? skip_block(table, in, position) : position;
}

}  // namespace
}  // namespace falconet
