// What hostile ranges may not do, for libFuzzer or for the driver in fuzz_driver.cpp: every 40 bytes of the input are a
// range of one small file, asked for as a shard's index asks.
//
// Beyond what the sanitizers watch: what is read is what the file holds there, and what cannot be is refused.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "crc32c.hpp"
#include "files.hpp"

using falconet::Range;
using falconet::Status;

namespace {

constexpr int64_t file_bytes = 4096, most = 1 << 20;

void insist(bool holds, const char* what) {
    if (holds) return;
    std::fprintf(stderr, "not held: %s\n", what);
    std::abort();
}

uint8_t byte_at(int64_t place) { return static_cast<uint8_t>(place * 31 + place / 256); }

int opened_file() {
    std::FILE* file = std::tmpfile();
    insist(file != nullptr, "there is a file");
    for (int64_t place = 0; place < file_bytes; ++place) std::fputc(byte_at(place), file);
    std::fflush(file);
    return fileno(file);
}

// Small numbers, mostly: of wild ones nearly all are refused. The lowest bits choose.
int64_t number(const uint8_t* bytes) {
    int64_t wide = 0;
    std::memcpy(&wide, bytes, sizeof wide);
    return (bytes[0] & 3) == 3 ? wide : (wide >> 8) & 0x1FFF;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    static const int file = opened_file();
    falconet::Buffer<uint8_t> buffer;
    for (; size >= 40; data += 40, size -= 40) {
        Range range{file, number(data), number(data + 8), number(data + 16), number(data + 24), 0};
        std::memcpy(&range.crc32c, data + 32, sizeof range.crc32c);
        const bool checked = (data[36] & 1) != 0;
        size_t length = 0;
        falconet::expect(range, most);
        const Status status = falconet::read_range(range, checked, most, buffer, length);
        const bool can_be = range.begin >= 0 && range.size >= 0 && range.skip >= 0 && range.length >= 0;
        insist(can_be || status == Status::bad_request, "a negative number is refused");
        if (status != Status::ok) continue;
        insist(range.size == 0 || range.begin <= file_bytes - range.size, "what is read is in the file");
        insist(length == static_cast<size_t>(range.length), "the image has its length");
        for (size_t i = 0; i < length; ++i)
            insist(buffer.data()[i] == byte_at(range.begin + range.skip + static_cast<int64_t>(i)), "the file's bytes");
    }
    return 0;
}
