// The result for one image. The numbers are the C interface's: binding.py names the same ones.
#pragma once
#include <cstdint>

namespace falconet {

enum class Status : int8_t {
    ok = 0,
    not_jpeg = 1,     // the bytes do not start like a JPEG
    unsupported = 2,  // a JPEG this decoder leaves to another one: progressive, CMYK, 12 bit, ...
    damaged = 3,      // truncated or contradictory; another decoder may still decode it
    too_large = 4,    // beyond the limits on pixels or memory
    unreadable = 5,   // the file cannot be opened or read
    no_memory = 6,
    bad_request = 7,  // the box is not within the image, or the output has no size
    changed = 8,      // checksum mismatch
};

struct Limits {
    int64_t pixels;  // of the whole image, as its header says
    int64_t bytes;   // of working memory for one image
};

}  // namespace falconet
