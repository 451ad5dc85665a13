// Standard C++ only, so that it builds anywhere; a pipe or a device is refused before it can block.
#include "files.hpp"

#include <cstdio>
#include <filesystem>
#include <memory>
#include <system_error>

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

}  // namespace falconet
