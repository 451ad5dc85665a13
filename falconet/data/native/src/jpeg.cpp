// Parsing of markers. Every length is checked against the bytes there are before anything after it is read.
#include "jpeg.hpp"

#include <cstring>

#include "zigzag.hpp"

namespace falconet {

namespace {

enum Marker : int {
    TEM = 0x01,
    SOF0 = 0xC0,
    SOF1 = 0xC1,
    DHT = 0xC4,
    JPG = 0xC8,
    DAC = 0xCC,
    SOF15 = 0xCF,
    RST0 = 0xD0,
    RST7 = 0xD7,
    SOI = 0xD8,
    EOI = 0xD9,
    SOS = 0xDA,
    DQT = 0xDB,
    DRI = 0xDD,
    APP14 = 0xEE,
};

// One marker's payload: `size` bytes, all of them inside the file.
struct Segment {
    const uint8_t* data;
    int size;
    int byte(int at) const { return data[at]; }
    int word(int at) const { return data[at] << 8 | data[at + 1]; }
};

Status read_frame(const Segment& s, Header& header) {
    if (s.size < 6) return Status::damaged;
    if (s.byte(0) != 8) return Status::unsupported;  // bits per sample
    header.height = s.word(1);
    header.width = s.word(3);
    header.components = s.byte(5);
    // A height of 0 means that it follows the scan (DNL); no encoder writes that.
    if (header.width == 0 || header.height == 0) return Status::unsupported;
    if (header.components != 1 && header.components != 3) return Status::unsupported;
    if (s.size != 6 + 3 * header.components) return Status::damaged;
    int blocks = 0;
    for (int c = 0; c < header.components; ++c) {
        Component& component = header.component[c];
        component.id = s.byte(6 + 3 * c);
        component.across = s.byte(7 + 3 * c) >> 4;
        component.down = s.byte(7 + 3 * c) & 15;
        component.quant = s.byte(8 + 3 * c);
        if (component.across < 1 || component.across > 4 || component.down < 1 || component.down > 4)
            return Status::damaged;
        if (component.quant > 3) return Status::damaged;
        for (int other = 0; other < c; ++other)
            if (header.component[other].id == component.id) return Status::damaged;
        if (header.max_across < component.across) header.max_across = component.across;
        if (header.max_down < component.down) header.max_down = component.down;
        blocks += component.across * component.down;
    }
    if (header.components == 1) {
        // The only component of a scan is not interleaved: its MCU is one block, whatever the factors say.
        header.component[0].across = header.component[0].down = header.max_across = header.max_down = 1;
        return Status::ok;
    }
    if (blocks > 10) return Status::damaged;  // the standard's limit, which bits.hpp's padding counts on
    for (const Component& component : header.component)
        if (header.max_across % component.across != 0 || header.max_down % component.down != 0)
            return Status::unsupported;
    return Status::ok;
}

Status read_huffman(const Segment& s, Tables& tables) {
    for (int at = 0; at < s.size;) {
        if (at + 17 > s.size) return Status::damaged;
        const int kind = s.byte(at) >> 4, number = s.byte(at) & 15;
        if (kind > 1 || number > 3) return Status::damaged;
        int count = 0;
        for (int length = 1; length <= 16; ++length) count += s.byte(at + length);
        if (count > 256 || at + 17 + count > s.size) return Status::damaged;
        HuffmanTable& table = kind == 0 ? tables.dc[number] : tables.ac[number];
        table.define(s.data + at + 1, s.data + at + 17, count);
        at += 17 + count;
    }
    return Status::ok;
}

Status read_quantisation(const Segment& s, Tables& tables) {
    for (int at = 0; at < s.size;) {
        const int wide = s.byte(at) >> 4, number = s.byte(at) & 15;
        if (wide > 1 || number > 3 || at + 1 + 64 * (wide + 1) > s.size) return Status::damaged;
        for (int k = 0; k < 64; ++k) {
            const int step = wide != 0 ? s.word(at + 1 + 2 * k) : s.byte(at + 1 + k);
            if (step > INT16_MAX) return Status::unsupported;  // the transform works on 16 bits
            tables.quant[number][zig_zag.place[k]] = static_cast<int16_t>(step);
        }
        tables.quant_present[number] = true;
        at += 1 + 64 * (wide + 1);
    }
    return Status::ok;
}

Status read_scan(const Segment& s, Header& header) {
    const int components = s.size > 0 ? s.byte(0) : 0;
    if (components != header.components) return Status::unsupported;  // one component per scan, or several scans
    if (s.size != 1 + 2 * components + 3) return Status::damaged;
    for (int c = 0; c < components; ++c) {
        Component& component = header.component[c];
        if (s.byte(1 + 2 * c) != component.id) return Status::unsupported;
        component.dc = s.byte(2 + 2 * c) >> 4;
        component.ac = s.byte(2 + 2 * c) & 15;
        if (component.dc > 3 || component.ac > 3) return Status::damaged;
    }
    return Status::ok;
}

// Whether the three components are YCbCr, by libjpeg's rules; an uncertain case is left to Pillow.
bool is_ycbcr(const Header& header) {
    if (header.components == 1) return true;
    if (header.adobe_transform == 0) return false;
    const Component* c = header.component;
    return header.adobe_transform > 0 || !(c[0].id == 'R' && c[1].id == 'G' && c[2].id == 'B');
}

Status read_segment(int marker, const Segment& segment, Header& header, Tables* tables) {
    switch (marker) {
        case DHT: return tables != nullptr ? read_huffman(segment, *tables) : Status::ok;
        case DQT: return tables != nullptr ? read_quantisation(segment, *tables) : Status::ok;
        case DRI:
            if (segment.size != 2) return Status::damaged;
            header.restart_interval = segment.word(0);
            return Status::ok;
        case APP14:
            if (segment.size >= 12 && std::memcmp(segment.data, "Adobe", 5) == 0)
                header.adobe_transform = segment.byte(11);
            return Status::ok;
        case DAC: return Status::unsupported;
        default: return Status::ok;  // metadata and comments
    }
}

void forget(Tables& tables) {
    for (int number = 0; number < 4; ++number) {
        tables.quant_present[number] = false;
        tables.dc[number].present = tables.ac[number].present = false;
    }
}

}  // namespace

Status read_header(const uint8_t* data, size_t size, Header& header, Tables* tables) {
    header = Header();
    if (tables != nullptr) forget(*tables);
    if (size < 3 || data[0] != 0xFF || data[1] != SOI || data[2] != 0xFF) return Status::not_jpeg;
    bool framed = false;
    size_t at = 2;
    for (;;) {
        if (at >= size || data[at] != 0xFF) return Status::damaged;
        while (at < size && data[at] == 0xFF) ++at;  // a marker may be preceded by any number of fill bytes
        if (at >= size) return Status::damaged;
        const int marker = data[at++];
        if (marker == TEM || (marker >= RST0 && marker <= RST7)) continue;  // these have no payload
        if (marker == 0 || marker == SOI || marker == EOI) return Status::damaged;
        if (size - at < 2) return Status::damaged;
        const int length = data[at] << 8 | data[at + 1];  // of the payload and these two bytes
        if (length < 2 || static_cast<size_t>(length) > size - at) return Status::damaged;
        const Segment segment{data + at + 2, length - 2};
        at += static_cast<size_t>(length);

        Status status;
        if (marker == SOF0 || marker == SOF1) {
            if (framed) return Status::damaged;
            framed = true;
            status = read_frame(segment, header);
        } else if (marker > SOF1 && marker <= SOF15 && marker != DHT && marker != JPG && marker != DAC) {
            return Status::unsupported;  // progressive, lossless, hierarchical, arithmetic
        } else if (marker == SOS) {
            if (!framed) return Status::damaged;
            status = read_scan(segment, header);
            header.scan = at;
            if (status == Status::ok && !is_ycbcr(header)) status = Status::unsupported;
            return status;
        } else {
            status = read_segment(marker, segment, header, tables);
        }
        if (status != Status::ok) return status;
    }
}

Status prepare_tables(const Header& header, Tables& tables, bool skipping) {
    for (int c = 0; c < header.components; ++c) {
        const Component& component = header.component[c];
        HuffmanTable &dc = tables.dc[component.dc], &ac = tables.ac[component.ac];
        // Files without tables exist (frames of motion JPEG); other decoders know which ones are meant.
        if (!dc.present || !ac.present || !tables.quant_present[component.quant]) return Status::unsupported;
        if (!dc.prepare_dc() || !ac.prepare_ac(skipping)) return Status::damaged;
    }
    return Status::ok;
}

}  // namespace falconet
