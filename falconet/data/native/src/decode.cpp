// The steps of one image in order: markers, plan, scan, resize.
#include "decode.hpp"

#include <cstring>

#include "zigzag.hpp"

namespace falconet {

constexpr size_t kept_bytes = size_t{64} << 20;  // working memory kept for the next image

Status Decoder::measure(const uint8_t* data, size_t size, int& width, int& height) const {
    Header header;
    const Status status = read_header(data, size, header, nullptr);
    width = header.width;
    height = header.height;
    if (status != Status::ok) return status;
    return static_cast<int64_t>(width) * height > limits_.pixels ? Status::too_large : Status::ok;
}

Status Decoder::decode(const uint8_t* data, size_t size, const Request& request, uint8_t* out) {
    Header header;
    Status status = read_header(data, size, header, &tables_);
    if (status == Status::ok) status = region_.plan(header, request, limits_);
    if (status == Status::ok) {
        // A reduced block is made of its lowest frequencies, and the rest is passed over.
        bool skipping = region_.skips(header);
        for (int c = 0; c < header.components; ++c)
            skipping = skipping || region_.part[c].wide * region_.part[c].high < 64;
        status = prepare_tables(header, tables_, skipping);
    }
    if (status == Status::ok) status = decode_planes(data, size, header);
    if (status == Status::ok) resize(header, request, out);
    give_back_large_buffers();
    return status;
}

bool find_restarts(const uint8_t* data, const uint8_t* end, const Header& header, std::vector<size_t>& restarts) {
    const int64_t mcus = static_cast<int64_t>(header.mcus_across()) * header.mcus_down();
    const int64_t intervals = (mcus + header.restart_interval - 1) / header.restart_interval;
    restarts.assign(1, 0);
    for (const uint8_t* at = data; end - at >= 2;) {
        at = static_cast<const uint8_t*>(std::memchr(at, 0xFF, static_cast<size_t>(end - at - 1)));
        if (at == nullptr) return false;
        const int marker = at[1];
        if (marker == 0) {
            at += 2;
        } else if (marker == 0xFF) {
            ++at;
        } else if (marker == 0xD9) {
            restarts.push_back(static_cast<size_t>(at - data));
            return static_cast<int64_t>(restarts.size()) == intervals + 1;
        } else {
            // Numbered 0 to 7 in turn: a lost one is noticed.
            const int64_t number = static_cast<int64_t>(restarts.size()) - 1;
            if (marker != 0xD0 + number % 8 || number + 1 >= intervals) return false;
            at += 2;
            restarts.push_back(static_cast<size_t>(at - data));
        }
    }
    return false;
}

// The zig-zag position of the highest frequency that a reduced block is made of.
static uint64_t last_needed(const Part& part) {
    const int corner = 8 * (part.high - 1) + part.wide - 1;
    uint64_t last = 63;
    while (zig_zag.place[last] != corner) --last;
    return last;
}

Status Decoder::decode_planes(const uint8_t* data, size_t size, const Header& header) {
    Scan scan{};
    scan.data = data + header.scan;
    scan.end = data + size;
    if (header.restart_interval != 0) {
        if (!find_restarts(scan.data, scan.end, header, restarts_)) return Status::damaged;
        scan.restarts = restarts_.data();
    }
    scan.restart_interval = header.restart_interval;
    scan.components = header.components;
    scan.mcus_across = header.mcus_across();
    scan.mcus_down = header.mcus_down();
    scan.x0 = region_.mcu_x0;
    scan.x1 = region_.mcu_x1;
    scan.y0 = region_.mcu_y0;
    scan.y1 = region_.mcu_y1;
    for (int c = 0; c < header.components; ++c) {
        const Component& component = header.component[c];
        const Part& part = region_.part[c];
        int8_t* plane = planes_[c].need(part.plane_bytes());
        scan.component[c] = {&tables_.dc[component.dc],
                             &tables_.ac[component.ac],
                             tables_.quant[component.quant],
                             component.across,
                             component.down,
                             part.wide,
                             part.high,
                             last_needed(part),
                             plane,
                             part.stride,
                             plane + part.columns * part.stride};
    }
    scan.clean = clean_.need(size - header.scan + clean_padding + 64);
    return kernels_.decode(scan);
}

void Decoder::resize(const Header& header, const Request& request, uint8_t* out) {
    const int padded = region_.padded_size(request);
    Picture picture{};
    picture.components = header.components;
    picture.size = request.size;
    picture.padded = padded;
    picture.out = out;
    picture.planar = request.planar;
    picture.rows = rows_.need(static_cast<size_t>(padded) * 3);
    AxisView across[3] = {};
    for (int c = 0; c < header.components; ++c) {
        const Component& component = header.component[c];
        const Part& part = region_.part[c];
        if (part.axes == c) {
            across[c] = region_.across[c].view(region_.mcu_x0 * component.across * part.wide);
            picture.down[c] = region_.down[c].view(part.first_row);
        } else {
            picture.down[c] = picture.down[part.axes];
        }
        int16_t* sideways = sideways_.need(static_cast<size_t>(padded) * static_cast<size_t>(part.rows));
        int16_t* columns = columns_[c].need(static_cast<size_t>(padded) * static_cast<size_t>(part.rows));
        const int8_t* plane = planes_[c].data() + (part.first_row - region_.mcu_y0 * component.down * part.high);
        kernels_.resize_across(plane, part.stride, across[part.axes], part.rows, sideways);
        kernels_.transpose(sideways, padded, part.rows, columns);
        picture.columns[c] = columns;
    }
    kernels_.finish(picture);
}

void Decoder::give_back_large_buffers() {
    size_t bytes = clean_.bytes() + sideways_.bytes();
    for (int c = 0; c < 3; ++c) bytes += planes_[c].bytes() + columns_[c].bytes();
    if (bytes <= kept_bytes) return;
    clean_.release();
    sideways_.release();
    for (int c = 0; c < 3; ++c) {
        planes_[c].release();
        columns_[c].release();
    }
}

}  // namespace falconet
