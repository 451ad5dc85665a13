// Every read is checked against the bytes there are; a file that contradicts itself is left to a decoder.
#include "look.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

namespace falconet {

namespace {

constexpr int64_t window_bytes = 4096;  // holds all headers but those after a long EXIF block
constexpr int64_t tail_bytes = 1024;    // cameras may add a little after the end
constexpr int most_segments = 10000;    // of a JPEG before its size

class File {
public:
    explicit File(const char* path) {
        struct stat status;
        if (stat(path, &status) != 0 || !S_ISREG(status.st_mode)) return;  // opening a pipe would wait
        file_ = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
        if (file_ >= 0 && (fstat(file_, &status) != 0 || !S_ISREG(status.st_mode))) close_it();
        if (file_ >= 0) size_ = static_cast<int64_t>(status.st_size);
    }
    File(const File&) = delete;
    File& operator=(const File&) = delete;
    ~File() { close_it(); }

    bool opened() const { return file_ >= 0; }
    bool failed() const { return failed_; }
    int64_t size() const { return size_; }

    // `count` bytes from `place` on, valid until the next call; null if the file does not have them.
    const uint8_t* bytes(int64_t place, int64_t count) {
        if (place < 0 || count > window_bytes || place > size_ - count) return nullptr;
        if (place < begin_ || place + count > begin_ + have_) {
            begin_ = place;
            have_ = 0;
            const int64_t wanted = std::min(window_bytes, size_ - place);
            while (have_ < wanted) {
                const ssize_t got = pread(file_, window_ + have_, static_cast<size_t>(wanted - have_),
                                          static_cast<off_t>(place + have_));
                if (got < 0 && errno == EINTR) continue;
                if (got < 0) failed_ = true;
                if (got <= 0) break;
                have_ += got;
            }
        }
        return place + count <= begin_ + have_ ? window_ + (place - begin_) : nullptr;
    }

private:
    void close_it() {
        if (file_ >= 0) close(file_);
        file_ = -1;
    }
    int file_ = -1;
    int64_t size_ = 0, begin_ = 0, have_ = 0;
    bool failed_ = false;
    uint8_t window_[window_bytes];
};

int32_t big16(const uint8_t* b) { return b[0] << 8 | b[1]; }
int32_t little16(const uint8_t* b) { return b[1] << 8 | b[0]; }
int32_t little24(const uint8_t* b) { return b[2] << 16 | b[1] << 8 | b[0]; }
uint32_t big32(const uint8_t* b) { return static_cast<uint32_t>(big16(b)) << 16 | static_cast<uint32_t>(big16(b + 2)); }
uint32_t little32(const uint8_t* b) {
    return static_cast<uint32_t>(little16(b + 2)) << 16 | static_cast<uint32_t>(little16(b));
}

// A size with an end; without either, decoding decides.
Look sized(int64_t width, int64_t height, bool ended) {
    if (width <= 0 || height <= 0 || width > INT32_MAX || height > INT32_MAX) return {0, 0, State::doubtful};
    return {static_cast<int32_t>(width), static_cast<int32_t>(height), ended ? State::whole : State::doubtful};
}

// Whether these bytes are among the last of the file.
bool ends_with(File& file, const char* mark, size_t length) {
    const int64_t count = std::min(tail_bytes, file.size());
    const uint8_t* tail = file.bytes(file.size() - count, count);
    if (tail == nullptr) return false;
    return std::search(tail, tail + count, mark, mark + length,
                       [](uint8_t a, char b) { return a == static_cast<uint8_t>(b); }) != tail + count;
}

Look look_at_jpeg(File& file) {
    int64_t at = 2;
    for (int segment = 0; segment < most_segments; ++segment) {
        const uint8_t* mark = file.bytes(at, 2);
        if (mark == nullptr || mark[0] != 0xFF) break;
        const int kind = mark[1];
        if (kind == 0xFF) {  // a fill byte
            ++at;
            continue;
        }
        at += 2;
        if (kind == 0x01 || (kind >= 0xD0 && kind <= 0xD8)) continue;  // without a payload
        if (kind == 0xD9 || kind == 0xDA) break;                       // the end, or a scan without a size
        const uint8_t* head = file.bytes(at, 2);
        if (head == nullptr || big16(head) < 2) break;
        const int64_t length = big16(head);
        if (kind >= 0xC0 && kind <= 0xCF && kind != 0xC4 && kind != 0xC8 && kind != 0xCC) {
            const uint8_t* frame = file.bytes(at, 7);
            if (frame == nullptr) break;
            const int32_t height = big16(frame + 3), width = big16(frame + 5);
            return sized(width, height, ends_with(file, "\xFF\xD9", 2));
        }
        at += length;
    }
    return {0, 0, State::doubtful};
}

Look look_at_png(File& file) {
    const uint8_t* head = file.bytes(8, 16);
    if (head == nullptr || std::memcmp(head + 4, "IHDR", 4) != 0) return {0, 0, State::doubtful};
    const int64_t width = big32(head + 8), height = big32(head + 12);
    return sized(width, height, ends_with(file, "IEND", 4));
}

Look look_at_gif(File& file) {
    const uint8_t* head = file.bytes(6, 4);
    if (head == nullptr) return {0, 0, State::doubtful};
    const int32_t width = little16(head), height = little16(head + 2);
    return sized(width, height, ends_with(file, "\x3B", 1));
}

Look look_at_webp(File& file) {
    const uint8_t* head = file.bytes(0, 30);
    if (head == nullptr) return {0, 0, State::doubtful};
    const bool ended = static_cast<int64_t>(little32(head + 4)) + 8 <= file.size();
    if (std::memcmp(head + 12, "VP8X", 4) == 0) return sized(1 + little24(head + 24), 1 + little24(head + 27), ended);
    if (std::memcmp(head + 12, "VP8L", 4) == 0) {
        const uint32_t bits = little32(head + 21);
        return sized(1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF), ended);
    }
    if (std::memcmp(head + 12, "VP8 ", 4) == 0)
        return sized(little16(head + 26) & 0x3FFF, little16(head + 28) & 0x3FFF, ended);
    return {0, 0, State::doubtful};
}

Look look_at_bmp(File& file) {
    const uint8_t* head = file.bytes(0, 26);
    if (head == nullptr || little32(head + 14) < 40) return {0, 0, State::other};
    const int64_t width = static_cast<int32_t>(little32(head + 18)), height = static_cast<int32_t>(little32(head + 22));
    return sized(width, height < 0 ? -height : height, static_cast<int64_t>(little32(head + 2)) <= file.size());
}

Look look_in(File& file) {
    const uint8_t* head = file.bytes(0, std::min<int64_t>(12, file.size()));
    if (head == nullptr) return {0, 0, State::unreadable};
    const int64_t count = std::min<int64_t>(12, file.size());
    const auto starts = [&](const char* mark, int64_t length, int64_t at = 0) {
        return count >= at + length && std::memcmp(head + at, mark, static_cast<size_t>(length)) == 0;
    };
    if (starts("\xFF\xD8\xFF", 3)) return look_at_jpeg(file);
    if (starts("\x89PNG\r\n\x1A\n", 8)) return look_at_png(file);
    if (starts("GIF87a", 6) || starts("GIF89a", 6)) return look_at_gif(file);
    if (starts("RIFF", 4) && starts("WEBP", 4, 8)) return look_at_webp(file);
    if (starts("BM", 2)) return look_at_bmp(file);
    return {0, 0, State::other};
}

}  // namespace

bool stamp_of(const char* path, int64_t& size, int64_t& time) {
    struct stat status;
    if (stat(path, &status) != 0 || !S_ISREG(status.st_mode)) return false;
    size = static_cast<int64_t>(status.st_size);
#if defined(__APPLE__)
    const auto& changed = status.st_mtimespec;
#else
    const auto& changed = status.st_mtim;
#endif
    time = static_cast<int64_t>(changed.tv_sec) * 1000000000 + changed.tv_nsec;
    return true;
}

Look look_at(const char* path) {
    File file(path);
    if (!file.opened()) return {0, 0, State::unreadable};
    if (file.size() == 0) return {0, 0, State::empty};
    const Look found = look_in(file);
    return file.failed() ? Look{0, 0, State::unreadable} : found;
}

}  // namespace falconet
