// Whole files by standard C++, where a pipe or a device is refused before it can block; ranges by POSIX's pread.
#include "files.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <limits>
#include <memory>
#include <system_error>

#include "crc32c.hpp"

namespace falconet {

Status read_file(const char* path, int64_t most, Buffer<uint8_t>& buffer, size_t& size) {
    std::error_code error;
    const std::filesystem::directory_entry entry(path, error);
    if (error || !entry.is_regular_file(error) || error) return Status::unreadable;
    const auto bytes = entry.file_size(error);
    if (error) return Status::unreadable;
    if (bytes > static_cast<uintmax_t>(most)) return Status::too_large;
    const std::unique_ptr<std::FILE, int (*)(std::FILE*)> file(std::fopen(path, "rb"), &std::fclose);
    if (!file) return Status::unreadable;
    std::setvbuf(file.get(), nullptr, _IONBF, 0);  // straight into the buffer
    size = static_cast<size_t>(bytes);
    uint8_t* data = buffer.need(size + 1);
    return std::fread(data, 1, size, file.get()) == size ? Status::ok : Status::unreadable;
}

Status check(const Range& range, int64_t most) {
    if (range.begin < 0 || range.size < 0 || range.skip < 0 || range.length < 0 || range.skip > range.size ||
        range.length > range.size - range.skip || range.begin > std::numeric_limits<int64_t>::max() - range.size)
        return Status::bad_request;
    return range.size > most ? Status::too_large : Status::ok;
}

void expect(const Range& range, int64_t most) {
    if (check(range, most) != Status::ok) return;
#if defined(POSIX_FADV_WILLNEED)
    constexpr int64_t request = 128 << 10;  // Linux reads only this much of a longer one
    for (int64_t done = 0; done < range.size; done += request)
        posix_fadvise(range.file, static_cast<off_t>(range.begin + done),
                      static_cast<off_t>(std::min(request, range.size - done)), POSIX_FADV_WILLNEED);
#endif
}

Status read_range(const Range& range, bool checked, int64_t most, Buffer<uint8_t>& buffer, size_t& size) {
    const Status possible = check(range, most);
    if (possible != Status::ok) return possible;
    const size_t wanted = static_cast<size_t>(range.size);
    uint8_t* data = buffer.need(wanted + 1);
    for (size_t have = 0; have < wanted;) {
        const ssize_t got = pread(range.file, data + have, wanted - have, static_cast<off_t>(range.begin) + have);
        if (got < 0 && errno == EINTR) continue;
        if (got <= 0) return Status::unreadable;
        have += static_cast<size_t>(got);
    }
    if (checked && crc32c(data, wanted, 0) != range.crc32c) return Status::changed;
    size = static_cast<size_t>(range.length);
    if (range.skip > 0) std::memmove(data, data + range.skip, size);
    return Status::ok;
}

}  // namespace falconet
