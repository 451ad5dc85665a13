// What a file's first and last bytes say about its image, without reading the rest.
#pragma once
#include <cstdint>

namespace falconet {

// The numbers are the C interface's: binding.py names the same ones.
enum class State : int8_t {
    whole = 0,       // starts and ends like an image of this size
    other = 1,       // of another format: another reader has to look
    doubtful = 2,    // no size where it should be, or no end: decoding it decides
    empty = 3,       // no bytes
    unreadable = 4,  // cannot be opened or read, or is not a regular file
};

struct Look {
    int32_t width = 0, height = 0;
    State state = State::unreadable;
};

// The file's size and time of change in nanoseconds; false if it is not a regular file that is there.
bool stamp_of(const char* path, int64_t& size, int64_t& time);

// JPEG, PNG, GIF, WebP and BMP are recognised by their content.
Look look_at(const char* path);

}  // namespace falconet
