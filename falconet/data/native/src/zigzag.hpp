// The order of a block's coefficients in the stream.
#pragma once
#include <cstdint>

namespace falconet {
namespace {

// Zig-zag position -> row * 8 + column. Positions from 64 on, where a block ends, are all the spare slot 64.
struct ZigZag {
    uint8_t place[192];

    constexpr ZigZag() : place() {
        for (int k = 0; k < 192; ++k) place[k] = 64;
        for (int k = 0, row = 0, column = 0; k < 64; ++k) {
            place[k] = static_cast<uint8_t>(8 * row + column);
            const bool rising = (row + column) % 2 == 0;
            int& along = rising ? column : row;    // grows on the way,
            int& against = rising ? row : column;  // shrinks on the way
            if (along == 7) {
                ++against;
            } else {
                ++along;
                if (against > 0) --against;
            }
        }
    }
};
constexpr ZigZag zig_zag;

}  // namespace
}  // namespace falconet
