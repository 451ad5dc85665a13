// Building the look-up tables of huffman.hpp; a few microseconds per table, and most photos have their own.
#include "huffman.hpp"

#include <cstring>

namespace falconet {

void HuffmanTable::define(const uint8_t counts_1_to_16[16], const uint8_t* values, int count) {
    const bool same = size == count && std::memcmp(counts + 1, counts_1_to_16, 16) == 0 &&
                      std::memcmp(symbols, values, static_cast<size_t>(count)) == 0;
    if (!same) {
        std::memcpy(counts + 1, counts_1_to_16, 16);
        std::memset(symbols, 0, sizeof symbols);
        std::memcpy(symbols, values, static_cast<size_t>(count));
        size = count;
        ready = skip_ready = false;
    }
    present = true;
}

// Canonical codes: consecutive numbers, doubled from one length to the next. No code may be all ones.
bool HuffmanTable::assign(uint8_t lengths[256]) {
    int code = 0, place = 0;
    for (int length = 1; length <= 16; ++length) {
        offset[length] = place - code;
        for (int i = 0; i < counts[length]; ++i, ++code) {
            if (place >= 256) return false;
            lengths[place++] = static_cast<uint8_t>(length);
        }
        if (counts[length] != 0 && code >= (1 << length)) return false;
        last_code[length] = counts[length] != 0 ? code - 1 : -1;
        code <<= 1;
    }
    return true;
}

int advance(int symbol) {
    const int zeros = symbol >> 4, bits = symbol & 15;
    if (bits != 0) return zeros + 1;
    return zeros == 15 ? 16 : end_of_block;
}

// Codes come in increasing order, so the entries are written from the first to the last without a gap.
void HuffmanTable::fill_fast(const uint8_t lengths[256], int index_bits, bool ac) {
    Entry* entry = fast;
    for (int place = 0; place < size && lengths[place] <= index_bits; ++place) {
        const int symbol = symbols[place], moves = ac ? advance(symbol) : 0;
        const bool valued = (symbol & 15) != 0, sign_known = lengths[place] < index_bits;
        // The bit after the code is the sign if there is a value.
        for (int sign = 0; sign < 2; ++sign) {
            const Entry one =
                valued && !sign_known ? incomplete : entry_of(symbol, lengths[place], moves, valued && sign == 0);
            const int half = sign_known ? 1 << (index_bits - lengths[place] - 1) : 1 - sign;
            for (int i = 0; i < half; ++i) *entry++ = one;
        }
    }
    while (entry < fast + (1 << index_bits)) *entry++ = incomplete;
    ready = true;
}

bool HuffmanTable::prepare_dc() {
    if (ready) return true;
    uint8_t lengths[256];
    if (!assign(lengths)) return false;
    for (int place = 0; place < size; ++place)
        if (symbols[place] > 15) return false;  // a DC symbol is a number of value bits
    fill_fast(lengths, dc_bits, false);
    return true;
}

bool HuffmanTable::prepare_ac(bool with_skip) {
    if (ready && (skip_ready || !with_skip)) return true;
    uint8_t lengths[256];
    if (!assign(lengths)) return false;
    if (!ready) fill_fast(lengths, ac_bits, true);
    if (with_skip && !skip_ready) fill_skip(lengths);
    return true;
}

void HuffmanTable::fill_skip(const uint8_t lengths[256]) {
    // First one symbol: bits used | advance << 8 | code length << 16; then as many in a row as have their code in the
    // index. Where there is none, the distance before the last is so great that the symbol is taken by itself.
    constexpr uint32_t none = 255u << 16;
    uint32_t single[1 << skip_bits];
    uint32_t* entry = single;
    for (int place = 0; place < size && lengths[place] <= skip_bits; ++place) {
        const uint32_t length = lengths[place];
        const uint32_t moves = static_cast<uint32_t>(advance(symbols[place]));
        const uint32_t one = (length + (symbols[place] & 15u)) | moves << 8 | length << 16;
        for (uint32_t i = 0; i < (1u << (skip_bits - length)); ++i) *entry++ = one;
    }
    while (entry < single + (1 << skip_bits)) *entry++ = none;

    constexpr uint32_t mask = (1u << skip_bits) - 1;
    for (uint32_t index = 0; index <= mask; ++index) {
        uint32_t next = single[index];
        if (next == none) {
            skip[index] = none;
            continue;
        }
        uint32_t used = next & 63, moved = next >> 8 & 255, before_last = 0;
        while (moved < 63 && used < skip_bits) {  // from 63 on, the block has ended wherever it began
            next = single[(index << used) & mask];
            if (next == none || used + (next >> 16) > skip_bits) break;
            before_last = moved;
            used += next & 63;
            moved += next >> 8 & 255;
        }
        skip[index] = used | moved << 8 | before_last << 16;
    }
    skip_ready = true;
}

}  // namespace falconet
