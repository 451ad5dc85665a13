// One Huffman table of a JPEG, as look-up tables that decode a symbol and its value in one step.
#pragma once
#include <cstdint>

namespace falconet {

// An entry packs what one look-up yields:
//   bits 0..5    how many bits of the stream it uses up, code and value together
//   bit  6       not complete: the code is longer than the index, take the slow way
//   bits 8..15   how far it moves on in the block (AC)
//   bits 16..21  the length of the code alone
//   bits 24..29  63 less the number of value bits
// Only the low six bits of a bit count matter to the reader (bits.hpp), so an entry is subtracted from it whole.
constexpr uint32_t incomplete = 0x40;

constexpr int code_bits = 10;  // 4 KiB a table
constexpr int skip_bits = 11;  // several symbols at once, for blocks whose values nobody needs

// How far the end-of-block code moves on. A block ends well at position 63 exactly, or beyond 128 by this code; what
// ends between has run over its end, and an invalid code is given the distance 64 so that it ends there too.
constexpr uint32_t end_of_block = 128;
constexpr uint32_t invalid_code = 64;

struct HuffmanTable {
    // As the file has it.
    bool present = false;     // defined in this image
    uint8_t counts[17] = {};  // codes of each length 1..16
    uint8_t symbols[256] = {};
    int size = 0;  // symbols in all

    // Made from it; kept for the next image if that brings the same table, as the standard ones are.
    bool ready = false;
    bool skip_ready = false;
    uint32_t fast[1 << code_bits];
    uint32_t skip[1 << skip_bits];  // bits 16..23: how far all symbols but the last move on, instead of the length
    int32_t last_code[17];          // of each length; -1: none
    int32_t offset[17];             // from a code of this length to its symbol's place

    void define(const uint8_t counts_1_to_16[16], const uint8_t* values, int size);
    bool prepare_dc();  // false: the lengths contradict each other, or a symbol is out of range
    bool prepare_ac(bool with_skip);

private:
    bool assign(uint8_t lengths[256]);
    void fill_fast(const uint8_t lengths[256], bool ac);
    void fill_skip(const uint8_t lengths[256]);
};

// How far an AC symbol moves on: over its zeros and its value; over 16 zeros; or out of the block.
uint32_t advance(int symbol);

// The number a JPEG means by the `bits` value bits `raw`: the upper half are themselves, the lower half negative.
inline int extended(int raw, int bits) { return raw < (1 << (bits - 1)) ? raw - (1 << bits) + 1 : raw; }

}  // namespace falconet
