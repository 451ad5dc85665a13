// Decodes the symbols twice, once to count them and once to write them again: slower than keeping the coefficients, but
// it takes hardly any memory, and an image is packed only once.
#include "transcode.hpp"

#include <algorithm>
#include <cstring>
#include <memory>

#include "decode.hpp"
#include "entropy.hpp"
#include "jpeg.hpp"

namespace falconet {
namespace {

// The largest differences and coefficients that 8-bit pixels can have, in bits: what baseline JPEG allows.
constexpr int most_dc_bits = 11, most_ac_bits = 10;
constexpr int most_interval = 65535;
constexpr uint8_t no_run = 0xF0, end_symbol = 0x00;  // 16 zeros; end of block

int bits_of(int value) {
    const uint32_t size = static_cast<uint32_t>(value < 0 ? -value : value);
    return size != 0 ? 32 - __builtin_clz(size) : 0;
}

// Every block of the scan in order: visit(component, first of a restart interval, coefficients), which returns false to
// stop.
template <class Visit>
Status each_block(const uint8_t* data, size_t size, const Header& header, const Tables& tables,
                  const std::vector<size_t>& restarts, Buffer<uint8_t>& room, const Visit& visit) {
    const int64_t mcus = static_cast<int64_t>(header.mcus_across()) * header.mcus_down();
    const int64_t interval = header.restart_interval != 0 ? header.restart_interval : mcus;
    const uint8_t* scan = data + header.scan;
    uint8_t* clean = room.need(size - header.scan + clean_padding + 64);
    for (int64_t first = 0, number = 0; first < mcus; first += interval, ++number) {
        const uint8_t* from = scan;
        const uint8_t* end = data + size;
        if (header.restart_interval != 0) {
            from = scan + restarts[static_cast<size_t>(number)];
            end = scan + restarts[static_cast<size_t>(number) + 1];
        }
        uint8_t* clean_end = unstuff(from, end, clean);
        if (header.restart_interval == 0 && (end - from < 2 || from[1] != 0xD9)) return Status::damaged;
        std::memset(clean_end, 0, clean_zeros);
        BitReader in = begin_bits(clean);
        uint32_t mean[3] = {0, 0, 0};
        bool valid = true;
        const int64_t last = std::min(first + interval, mcus);
        for (int64_t mcu = first; mcu < last; ++mcu) {
            if (in.next > clean_end + 16) return Status::damaged;
            for (int c = 0; c < header.components; ++c) {
                const Component& component = header.component[c];
                for (int block = 0; block < component.across * component.down; ++block) {
                    int16_t coefficients[block_slots] = {};
                    mean[c] += static_cast<uint32_t>(dc_difference(tables.dc[component.dc], in, valid));
                    if (!ended_well(ac_block(tables.ac[component.ac], in, coefficients)) || !valid)
                        return Status::damaged;
                    coefficients[0] = static_cast<int16_t>(mean[c]);
                    if (!visit(mcu, c, coefficients)) return Status::unsupported;
                }
            }
        }
        if (used_bits(in, clean) > static_cast<uint64_t>(clean_end - clean) * 8) return Status::damaged;
    }
    return Status::ok;
}

// Splits a block into symbols with their value bits: put(is_ac, symbol, value bits, how many). False: out of range.
template <class Put>
bool each_symbol(const int16_t* block, int difference, const Put& put) {
    const auto low_bits = [](int value, int bits) {  // a negative value is written as one less
        return static_cast<uint32_t>(value < 0 ? value - 1 : value) & ((1u << bits) - 1);
    };
    const int dc = bits_of(difference);
    if (dc > most_dc_bits) return false;
    put(false, dc, low_bits(difference, dc), dc);
    int zeros = 0;
    for (int k = 1; k < 64; ++k) {
        const int value = block[zig_zag.place[k]];
        if (value == 0) {
            ++zeros;
            continue;
        }
        for (; zeros > 15; zeros -= 16) put(true, no_run, 0u, 0);
        const int bits = bits_of(value);
        if (bits > most_ac_bits) return false;
        put(true, zeros << 4 | bits, low_bits(value, bits), bits);
        zeros = 0;
    }
    if (zeros > 0) put(true, end_symbol, 0u, 0);
    return true;
}

// A Huffman table made for counted symbols.
struct Code {
    uint8_t counts[17] = {};  // of each length 1..16
    std::vector<uint8_t> symbols;
    uint8_t length[256] = {};
    uint16_t code[256] = {};
};

// Lengths as in annex K.2 of the standard: pairs of the rarest are joined, then lengths over 16 are shortened. A 257th
// symbol takes the all-ones code, which is not allowed, and is left out at the end.
Code code_for(const int64_t seen[256]) {
    int64_t frequency[257];
    int length[257] = {}, next[257];
    std::copy(seen, seen + 256, frequency);
    frequency[256] = 1;
    std::fill(next, next + 257, -1);
    const auto rarest = [&](int except) {  // the last one of the rarest, so that 256 comes first
        int found = -1;
        for (int i = 0; i < 257; ++i)
            if (frequency[i] > 0 && i != except && (found < 0 || frequency[i] <= frequency[found])) found = i;
        return found;
    };
    for (;;) {
        const int a = rarest(-1), b = rarest(a);
        if (b < 0) break;
        frequency[a] += frequency[b];
        frequency[b] = 0;
        int tail = a;
        for (;; tail = next[tail]) {
            ++length[tail];
            if (next[tail] < 0) break;
        }
        next[tail] = b;
        for (int i = b; i >= 0; i = next[i]) ++length[i];
    }
    int counts[258] = {};
    for (int i = 0; i < 257; ++i)
        if (length[i] != 0) ++counts[length[i]];
    for (int long_one = 257; long_one > 16; --long_one) {
        while (counts[long_one] > 0) {
            int shorter = long_one - 2;
            while (counts[shorter] == 0) --shorter;
            counts[long_one] -= 2;
            ++counts[long_one - 1];
            counts[shorter + 1] += 2;
            --counts[shorter];
        }
    }
    int longest = 16;
    while (longest > 0 && counts[longest] == 0) --longest;
    if (longest > 0) --counts[longest];

    Code made;
    for (int l = 1; l <= 16; ++l) made.counts[l] = static_cast<uint8_t>(counts[l]);
    for (int l = 1; l <= 257; ++l)
        for (int s = 0; s < 256; ++s)
            if (length[s] == l) made.symbols.push_back(static_cast<uint8_t>(s));
    int code = 0;
    size_t place = 0;
    for (int l = 1; l <= 16; ++l, code <<= 1) {
        for (int i = 0; i < counts[l] && place < made.symbols.size(); ++i) {
            const uint8_t symbol = made.symbols[place++];
            made.length[symbol] = static_cast<uint8_t>(l);
            made.code[symbol] = static_cast<uint16_t>(code++);
        }
    }
    return made;
}

class Writer {
public:
    explicit Writer(std::vector<uint8_t>& out) : out_(out) {}
    void byte(int value) { out_.push_back(static_cast<uint8_t>(value)); }
    void word(int value) {
        byte(value >> 8);
        byte(value);
    }
    void marker(int code) { word(0xFF00 | code); }
    void marker(int code, int payload) {
        marker(code);
        word(payload + 2);
    }
    void bits(uint32_t value, int count) {
        held_ = held_ << count | value;
        for (count_ += count; count_ >= 8; count_ -= 8) {
            const int next = static_cast<int>(held_ >> (count_ - 8) & 0xFF);
            byte(next);
            if (next == 0xFF) byte(0);
        }
        held_ &= (uint64_t{1} << count_) - 1;
    }
    void fill_byte() {  // with ones
        if (count_ != 0) bits((1u << (8 - count_)) - 1, 8 - count_);
    }

private:
    std::vector<uint8_t>& out_;
    uint64_t held_ = 0;
    int count_ = 0;
};

void write_quantisation(Writer& out, const Tables& tables, int number, bool wide) {
    out.marker(0xDB, wide ? 129 : 65);
    out.byte((wide ? 16 : 0) | number);
    for (int k = 0; k < 64; ++k) {
        const int step = tables.quant[number][zig_zag.place[k]];
        if (wide) out.word(step);
        else out.byte(step);
    }
}

void write_huffman(Writer& out, int kind_and_number, const Code& code) {
    out.marker(0xC4, 17 + static_cast<int>(code.symbols.size()));
    out.byte(kind_and_number);
    for (int l = 1; l <= 16; ++l) out.byte(code.counts[l]);
    for (const uint8_t symbol : code.symbols) out.byte(symbol);
}

// Everything before the scan. codes: DC and AC of the first component, DC and AC of the others.
void write_header(Writer& out, const Header& header, const Tables& tables, const Code codes[4], int interval) {
    out.marker(0xD8);
    if (header.adobe_transform >= 0) {  // says YCbCr, as JFIF does
        out.marker(0xEE, 12);
        for (const char letter : {'A', 'd', 'o', 'b', 'e'}) out.byte(letter);
        for (const int word : {100, 0, 0}) out.word(word);
        out.byte(header.adobe_transform);
    } else {
        out.marker(0xE0, 14);
        for (const char letter : {'J', 'F', 'I', 'F', '\0'}) out.byte(letter);
        for (const int byte : {1, 1, 0, 0, 1, 0, 1, 0, 0}) out.byte(byte);  // version, density, no thumbnail
    }
    bool extended_frame = false;
    for (int number = 0; number < 4; ++number) {
        bool used = false, wide = false;
        for (int c = 0; c < header.components; ++c) used = used || header.component[c].quant == number;
        if (!used) continue;
        for (const int16_t step : tables.quant[number]) wide = wide || step > 255;
        write_quantisation(out, tables, number, wide);
        extended_frame = extended_frame || wide;
    }
    out.marker(extended_frame ? 0xC1 : 0xC0, 6 + 3 * header.components);
    out.byte(8);
    out.word(header.height);
    out.word(header.width);
    out.byte(header.components);
    for (int c = 0; c < header.components; ++c) {
        const Component& component = header.component[c];
        out.byte(component.id);
        out.byte(component.across << 4 | component.down);
        out.byte(component.quant);
    }
    const int sets = header.components > 1 ? 2 : 1;
    for (int set = 0; set < sets; ++set) {
        write_huffman(out, set, codes[2 * set]);
        write_huffman(out, 16 | set, codes[2 * set + 1]);
    }
    out.marker(0xDD, 2);
    out.word(interval);
    out.marker(0xDA, 4 + 2 * header.components);
    out.byte(header.components);
    for (int c = 0; c < header.components; ++c) {
        out.byte(header.component[c].id);
        out.byte(c == 0 ? 0x00 : 0x11);
    }
    for (const int byte : {0, 63, 0}) out.byte(byte);
}

}  // namespace

Status restart_marked(const uint8_t* data, size_t size, int interval, int64_t most_pixels, std::vector<uint8_t>& out) {
    if (interval < 1 || interval > most_interval) return Status::bad_request;
    const auto tables = std::make_unique<Tables>();
    Header header;
    Status status = read_header(data, size, header, tables.get());
    if (status != Status::ok) return status;
    if (static_cast<int64_t>(header.width) * header.height > most_pixels) return Status::too_large;
    status = prepare_tables(header, *tables, false);
    if (status != Status::ok) return status;
    std::vector<size_t> restarts;
    if (header.restart_interval != 0 && !find_restarts(data + header.scan, data + size, header, restarts))
        return Status::damaged;

    Buffer<uint8_t> room;
    int last[3] = {0, 0, 0};
    int64_t last_mcu = 0;
    // The difference to the block before, which counts as 0 at the beginning of an interval.
    const auto difference = [&](int64_t mcu, int c, const int16_t* block, bool& restarted) {
        restarted = mcu != last_mcu && mcu % interval == 0;
        last_mcu = mcu;
        if (restarted) last[0] = last[1] = last[2] = 0;
        const int step = block[0] - last[c];
        last[c] = block[0];
        return step;
    };

    auto counted = std::make_unique<int64_t[]>(4 * 256);
    status = each_block(data, size, header, *tables, restarts, room, [&](int64_t mcu, int c, const int16_t* block) {
        bool restarted = false;
        const int step = difference(mcu, c, block, restarted);
        return each_symbol(block, step, [&](bool ac, int symbol, uint32_t, int) {
            ++counted[static_cast<size_t>(256 * ((c == 0 ? 0 : 2) + (ac ? 1 : 0)) + symbol)];
        });
    });
    if (status != Status::ok) return status;

    Code codes[4];
    for (size_t i = 0; i < (header.components > 1 ? 4u : 2u); ++i) codes[i] = code_for(&counted[256 * i]);
    out.reserve(size + size / 16 + 4096);
    Writer writer(out);
    write_header(writer, header, *tables, codes, interval);
    last[0] = last[1] = last[2] = 0;
    last_mcu = 0;
    int restart = 0;
    status = each_block(data, size, header, *tables, restarts, room, [&](int64_t mcu, int c, const int16_t* block) {
        bool restarted = false;
        const int step = difference(mcu, c, block, restarted);
        if (restarted) {
            writer.fill_byte();
            writer.marker(0xD0 + restart++ % 8);
        }
        return each_symbol(block, step, [&](bool ac, int symbol, uint32_t value, int bits) {
            const Code& code = codes[(c == 0 ? 0 : 2) + (ac ? 1 : 0)];
            writer.bits(code.code[symbol], code.length[symbol]);
            if (bits != 0) writer.bits(value, bits);
        });
    });
    if (status != Status::ok) return status;
    writer.fill_byte();
    writer.marker(0xD9);
    return Status::ok;
}

}  // namespace falconet
