// One Huffman table of a JPEG, as look-up tables that decode a symbol and its value in one step.
#pragma once
#include <cstdint>

namespace falconet {

// An entry packs what one look-up yields, in the order that takes the fewest instructions to use it:
//   bits 0..5    how many bits of the stream it uses up, code and value together
//   bit  6       not complete: the index ends before the code and its value's sign do, take the slow way
//   bits 16..23  64 less the bits used up: where the value's bits begin, counted from the low end of the window
//   bits 24..31  how many value bits there are
//   bits 32..47  what is added to them: 0, or 1 - 2^bits where the first of them, the sign, says negative
//   bits 56..63  how far it moves on in the block (AC)
// Only the low six bits of a bit count matter to the reader (bits.hpp), so an entry is subtracted from it whole.
using Entry = uint64_t;
constexpr Entry incomplete = 0x40;

constexpr int ac_bits = 10;    // of the index: 8 KiB per table, and with two of them half of the nearest cache
constexpr int dc_bits = 8;     // 2 KiB
constexpr int skip_bits = 10;  // 4 KiB; several symbols at once, for blocks whose values are not needed

// How far the end-of-block code moves on. A block ends well at position 63 exactly, or beyond 128 by this code; what
// ends between has run over its end, and an invalid code is given the distance 64 so that it ends there too.
constexpr int end_of_block = 128;
constexpr int invalid_code = 64;

struct HuffmanTable {
    // As in the file.
    bool present = false;     // defined in this image
    uint8_t counts[17] = {};  // codes of each length 1..16
    uint8_t symbols[256] = {};
    int size = 0;  // symbols in all

    // Made from it; kept for the next image if that brings the same table, as the standard ones are.
    bool ready = false;
    bool skip_ready = false;
    Entry fast[1 << ac_bits];       // a DC table uses the first part
    uint32_t skip[1 << skip_bits];  // bits 0..5 as above; 8..15: how far its symbols move on, 16..23: all but the last
    int32_t last_code[17];          // of each length; -1: none
    int32_t offset[17];             // from a code of this length to its symbol's place

    void define(const uint8_t counts_1_to_16[16], const uint8_t* values, int size);
    bool prepare_dc();  // false: the lengths contradict each other, or a symbol is out of range
    bool prepare_ac(bool with_skip);

private:
    bool assign(uint8_t lengths[256]);
    void fill_fast(const uint8_t lengths[256], int index_bits, bool ac);
    void fill_skip(const uint8_t lengths[256]);
};

// How far an AC symbol moves on: over its zeros and its value; over 16 zeros; or out of the block.
int advance(int symbol);

// The entry of a symbol with a code of `length` bits: the lower half of its raw values mean negative numbers.
inline Entry entry_of(int symbol, int length, int moves, bool negative) {
    const uint64_t bits = static_cast<uint64_t>(symbol & 15), used = static_cast<uint64_t>(length) + bits;
    const uint64_t added = negative ? (1 - (uint64_t{1} << bits)) & 0xFFFF : 0;
    return used | (64 - used) << 16 | bits << 24 | added << 32 | static_cast<uint64_t>(moves) << 56;
}

}  // namespace falconet
