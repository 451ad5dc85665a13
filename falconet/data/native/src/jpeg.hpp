// The markers of a JPEG up to its scan: what the image is, and the tables to decode it with.
#pragma once
#include <cstddef>
#include <cstdint>

#include "huffman.hpp"
#include "status.hpp"

namespace falconet {

struct Component {
    int id = 0;
    int across = 1, down = 1;       // blocks in a minimum coded unit (MCU): the sampling factors
    int quant = 0, dc = 0, ac = 0;  // numbers of its tables
};

struct Header {
    int width = 0, height = 0;
    int components = 0;  // 1: grey; 3: YCbCr
    Component component[3];
    int max_across = 1, max_down = 1;
    int restart_interval = 0;  // MCUs; 0: none
    int adobe_transform = -1;  // -1: no Adobe marker
    size_t scan = 0;           // where the entropy-coded bytes start

    int mcus_across() const { return (width + 8 * max_across - 1) / (8 * max_across); }
    int mcus_down() const { return (height + 8 * max_down - 1) / (8 * max_down); }
};

struct Tables {
    HuffmanTable dc[4], ac[4];
    bool quant_present[4] = {};
    alignas(32) int16_t quant[4][64];  // row by row, as the coefficients are
};

// Reads the markers of `size` bytes. Without tables it only says what the image is, and whether this decoder supports it.
Status read_header(const uint8_t* data, size_t size, Header& header, Tables* tables);

// Makes the look-up tables the image's components need. `skipping`: some blocks' values are not needed.
Status prepare_tables(const Header& header, Tables& tables, bool skipping);

}  // namespace falconet
