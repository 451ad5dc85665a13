// The needed MCUs of a scan, from entropy-coded bytes to planes of pixels.
#pragma once
#include "idct.hpp"
#include "kernels.hpp"

namespace falconet {
namespace {

constexpr int marker_eoi = 0xD9;

// Up to two blocks of a component that wait for their transform, which takes two at once.
struct Waiting {
    alignas(32) int16_t blocks[2 * block_slots];
    int8_t* out[2];
    bool flat[2];
    int count;
};

FALCONET_INLINE void transform_waiting(Waiting& waiting, const ScanComponent& component) {
    int16_t *a = waiting.blocks, *b = waiting.blocks + block_slots;
    const bool flat = waiting.flat[0] && (waiting.count < 2 || waiting.flat[1]);
    if (flat) {
        flat_block(a[0], component.quant[0], waiting.out[0], component.stride);
        if (waiting.count == 2) flat_block(b[0], component.quant[0], waiting.out[1], component.stride);
        a[0] = b[0] = 0;
    } else {
        full_blocks(a, component.quant, waiting.out[0], waiting.count == 2 ? waiting.out[1] : component.spare,
                    component.stride);
    }
    waiting.count = 0;
}

// The state of one scan; the functions below are the loop's body, and keep the bit reader in registers.
struct ScanState {
    const Scan& scan;
    uint32_t mean[3] = {0, 0, 0};  // of each component's last block; unsigned, because a hostile file makes it wrap
    bool valid = true;             // false: a code that does not exist, or a block that ran over its end
    Waiting waiting[3];

    explicit ScanState(const Scan& s) : scan(s) {
        for (Waiting& w : waiting) {
            std::memset(w.blocks, 0, sizeof w.blocks);
            w.count = 0;
        }
    }
};

FALCONET_INLINE void skip_mcu(ScanState& state, BitReader& reader) {
    BitReader in = reader;
    for (int c = 0; c < state.scan.components; ++c) {
        const ScanComponent& component = state.scan.component[c];
        for (int block = 0; block < component.across * component.down; ++block) {
            state.mean[c] += static_cast<uint32_t>(dc_difference(*component.dc, in, state.valid));
            if (FALCONET_UNLIKELY(!ended_well(skip_block(*component.ac, in)))) state.valid = false;
        }
    }
    reader = in;
}

FALCONET_INLINE void decode_block(ScanState& state, BitReader& in, int c, int8_t* out) {
    const ScanComponent& component = state.scan.component[c];
    Waiting& waiting = state.waiting[c];
    int16_t* block = waiting.blocks + block_slots * waiting.count;
    state.mean[c] += static_cast<uint32_t>(dc_difference(*component.dc, in, state.valid));
    if (FALCONET_LIKELY(component.wide * component.high == 64)) {
        const uint64_t position = ac_block(*component.ac, in, block);
        if (FALCONET_UNLIKELY(!ended_well(position))) state.valid = false;
        block[0] = static_cast<int16_t>(state.mean[c]);
        waiting.flat[waiting.count] = position == end_of_block;
        waiting.out[waiting.count] = out;
        if (++waiting.count == 2) transform_waiting(waiting, component);
    } else {
        if (!ended_well(ac_block_until(*component.ac, in, component.last_needed, block))) state.valid = false;
        block[0] = static_cast<int16_t>(state.mean[c]);
        reduced_block(block, component.quant, component.wide, component.high, out, component.stride);
    }
}

FALCONET_INLINE void decode_mcu(ScanState& state, BitReader& reader, int x, int y) {
    BitReader in = reader;
    for (int c = 0; c < state.scan.components; ++c) {
        const ScanComponent& component = state.scan.component[c];
        const ptrdiff_t block_columns = component.wide * component.stride;
        int8_t* corner = component.plane + (x - state.scan.x0) * component.across * block_columns +
                         static_cast<ptrdiff_t>(y - state.scan.y0) * component.down * component.high;
        for (int v = 0; v < component.down; ++v)
            for (int h = 0; h < component.across; ++h)
                decode_block(state, in, c, corner + h * block_columns + v * component.high);
    }
    reader = in;
}

// MCUs first to last of the stream, which `clean` to `clean_end` holds without stuffing, then some zeros. What an MCU
// that runs beyond them finds has no meaning, and does not matter: the stream has ended before, and the answer is
// `damaged`.
Status decode_interval(ScanState& state, const uint8_t* clean_end, int64_t first, int64_t last) {
    const Scan& scan = state.scan;
    BitReader in = begin_bits(scan.clean);
    state.mean[0] = state.mean[1] = state.mean[2] = 0;
    // Looked at before each MCU, so that the padding is enough for what one can read; exactly, after the last.
    const auto more = [&] { return in.next <= clean_end + 16; };
    int64_t mcu = first;
    while (mcu < last) {
        const int y = static_cast<int>(mcu / scan.mcus_across);
        int x = static_cast<int>(mcu % scan.mcus_across);
        if (y >= scan.y1) break;
        const int64_t row = static_cast<int64_t>(y) * scan.mcus_across;
        const int end = static_cast<int>(last - row < scan.mcus_across ? last - row : scan.mcus_across);
        if (y < scan.y0) {
            for (; x < end && more(); ++x) skip_mcu(state, in);
        } else {
            for (; x < end && x < scan.x0 && more(); ++x) skip_mcu(state, in);
            for (; x < end && x < scan.x1 && more(); ++x) decode_mcu(state, in, x, y);
            const bool next_row_wanted = y + 1 < scan.y1 && row + scan.mcus_across + scan.x0 < last;
            if (!next_row_wanted) break;
            for (; x < end && more(); ++x) skip_mcu(state, in);
        }
        if (!more() || !state.valid) break;
        mcu = row + end;
    }
    const bool inside = used_bits(in, scan.clean) <= static_cast<uint64_t>(clean_end - scan.clean) * 8;
    return inside && state.valid ? Status::ok : Status::damaged;
}

// Whether any MCU of first to last is needed.
bool interval_wanted(const Scan& scan, int64_t first, int64_t last) {
    const int64_t across = scan.mcus_across;
    const int64_t from = first / across < scan.y0 ? scan.y0 : first / across;
    const int64_t to = (last - 1) / across >= scan.y1 ? scan.y1 - 1 : (last - 1) / across;
    for (int64_t row = from; row <= to; ++row) {
        const int64_t left = row * across < first ? first - row * across : 0;
        const int64_t right = (row + 1) * across > last ? last - row * across : across;
        if (left < scan.x1 && right > scan.x0) return true;
    }
    return false;
}

Status decode_scan(const Scan& scan) {
    ScanState state(scan);
    const int64_t mcus = static_cast<int64_t>(scan.mcus_across) * scan.mcus_down;
    const int64_t interval = scan.restart_interval != 0 ? scan.restart_interval : mcus;
    const int64_t wanted_from = static_cast<int64_t>(scan.y0) * scan.mcus_across + scan.x0;
    const int64_t wanted_to = static_cast<int64_t>(scan.y1 - 1) * scan.mcus_across + scan.x1;
    Status status = Status::ok;
    for (int64_t number = wanted_from / interval; number * interval < wanted_to && status == Status::ok; ++number) {
        const int64_t first = number * interval;
        const int64_t last = first + interval < mcus ? first + interval : mcus;
        if (!interval_wanted(scan, first, last)) continue;
        const uint8_t* from = scan.data;
        const uint8_t* end = scan.end;
        if (scan.restart_interval != 0) {
            from = scan.data + scan.restarts[number];
            end = scan.data + scan.restarts[number + 1];
        }
        uint8_t* clean_end = unstuff(from, end, scan.clean);
        // Without restarts the scan has to be whole, up to the end-of-image marker after it.
        if (scan.restart_interval == 0 && (end - from < 2 || from[1] != marker_eoi)) return Status::damaged;
        std::memset(clean_end, 0, clean_zeros);
        status = decode_interval(state, clean_end, first, last);
    }
    for (int c = 0; c < scan.components; ++c)
        if (state.waiting[c].count != 0) transform_waiting(state.waiting[c], scan.component[c]);
    return status;
}

}  // namespace
}  // namespace falconet
