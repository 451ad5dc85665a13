// The C functions that binding.py calls. None throws, none keeps a pointer it was given, and what happens to one image
// happens to no other. A workspace belongs to one thread at a time.
#include <algorithm>
#include <cstring>
#include <memory>
#include <new>
#include <vector>

#include "crc32c.hpp"
#include "decode.hpp"
#include "files.hpp"
#include "look.hpp"
#include "transcode.hpp"

#define FALCONET_API extern "C" __attribute__((visibility("default")))

#ifndef FALCONET_SOURCES
#define FALCONET_SOURCES "unknown"
#endif

namespace {

using falconet::Status;

struct Image {
    falconet::Buffer<uint8_t> file;
    size_t size = 0;
    Status status = Status::unreadable;
};

struct Workspace {
    falconet::Limits limits;
    falconet::Decoder decoder;
    std::vector<std::unique_ptr<Image>> images;  // kept, with their memory, for the next call
    int32_t opened = 0;

    Workspace(const falconet::Kernels& kernels, const falconet::Limits& l) : limits(l), decoder(kernels, l) {}
};

constexpr size_t kept_file_bytes = size_t{1} << 20;  // a larger file's memory is given back

// Reads by `read`, then the header.
template <class Read>
Status open_one(Workspace& workspace, Image& image, const Read& read, int32_t* size) {
    Status status = read(image);
    int width = 0, height = 0;
    if (status == Status::ok) status = workspace.decoder.measure(image.file.data(), image.size, width, height);
    size[0] = width;
    size[1] = height;
    return status;
}

template <class Work>
Status guarded(const Work& work) {
    try {
        return work();
    } catch (const std::bad_alloc&) {
        return Status::no_memory;
    } catch (...) {
        return Status::damaged;
    }
}

// Every image by `read`; what happens to one happens to no other.
template <class Read>
void open_all(Workspace& workspace, int32_t count, int32_t* sizes, int8_t* statuses, const Read& read) {
    workspace.opened = 0;
    for (int32_t i = 0; i < count; ++i) {
        sizes[2 * i] = sizes[2 * i + 1] = 0;
        const Status status = guarded([&] {
            if (static_cast<size_t>(i) == workspace.images.size())
                workspace.images.push_back(std::make_unique<Image>());
            Image& image = *workspace.images[static_cast<size_t>(i)];
            const auto own = [&](Image& opened) { return read(i, opened); };
            image.status = guarded([&] { return open_one(workspace, image, own, sizes + 2 * i); });
            return image.status;
        });
        statuses[i] = static_cast<int8_t>(status);
        if (static_cast<size_t>(i) >= workspace.images.size()) {  // not even its own record: give up on the rest
            for (int32_t rest = i; rest < count; ++rest) statuses[rest] = static_cast<int8_t>(Status::no_memory);
            return;
        }
        workspace.opened = i + 1;
    }
}

}  // namespace

// A digest of the sources it was built from: binding.py refuses a library built from others.
FALCONET_API const char* falconet_sources() { return FALCONET_SOURCES; }

FALCONET_API const char* falconet_processor() { return falconet::best_kernels().name; }

// `portable`: not the fastest code for this processor, but the one for any; for tests. Null: no memory.
FALCONET_API void* falconet_workspace(int64_t most_pixels, int64_t most_bytes, int32_t portable) {
    const falconet::Kernels& kernels = portable != 0 ? falconet::portable::kernels : falconet::best_kernels();
    return new (std::nothrow) Workspace(kernels, falconet::Limits{most_pixels, most_bytes});
}

FALCONET_API void falconet_workspace_free(void* workspace) { delete static_cast<Workspace*>(workspace); }

// Reads `count` files; sizes: count x (width, height); statuses: count.
FALCONET_API void falconet_open(void* handle, int32_t count, const char* const* paths, int32_t* sizes,
                                int8_t* statuses) {
    Workspace& workspace = *static_cast<Workspace*>(handle);
    open_all(workspace, count, sizes, statuses, [&](int32_t i, Image& image) {
        return falconet::read_file(paths[i], workspace.limits.bytes, image.file, image.size);
    });
}

// The same from ranges of open files. ranges: count x (begin, size, skip, length), see files.hpp; checksums: count, or
// null if there are none.
FALCONET_API void falconet_open_ranges(void* handle, int32_t count, const int32_t* files, const int64_t* ranges,
                                       const uint32_t* checksums, int32_t* sizes, int8_t* statuses) {
    Workspace& workspace = *static_cast<Workspace*>(handle);
    const auto range = [&](int32_t i) {
        const int64_t* r = ranges + 4 * static_cast<size_t>(i);
        return falconet::Range{files[i], r[0], r[1], r[2], r[3], checksums != nullptr ? checksums[i] : 0};
    };
    // Disks and networks are faster with many requests at once.
    for (int32_t i = 0; i < count; ++i) falconet::expect(range(i), workspace.limits.bytes);
    open_all(workspace, count, sizes, statuses, [&](int32_t i, Image& image) {
        return falconet::read_range(range(i), checksums != nullptr, workspace.limits.bytes, image.file, image.size);
    });
}

// The same from memory. data: count pointers; lengths: count, bytes. What can be decoded is copied.
FALCONET_API void falconet_open_memory(void* handle, int32_t count, const uint8_t* const* data, const int64_t* lengths,
                                       int32_t* sizes, int8_t* statuses) {
    Workspace& workspace = *static_cast<Workspace*>(handle);
    open_all(workspace, count, sizes, statuses, [&](int32_t i, Image& image) {
        if (lengths[i] < 0) return Status::bad_request;
        if (lengths[i] > workspace.limits.bytes) return Status::too_large;
        image.size = static_cast<size_t>(lengths[i]);
        int width = 0, height = 0;
        const Status status = workspace.decoder.measure(data[i], image.size, width, height);
        if (status == Status::ok) std::memcpy(image.file.need(image.size + 1), data[i], image.size);
        return status;
    });
}

// Decodes the files opened last, each once. boxes: count x (x0, y0, x1, y1); out: count x size x size x 3, or count x 3
// x size x size if planar; filter: a falconet::Filter. Rows whose status is not 0 are left as they come.
FALCONET_API void falconet_decode(void* handle, int32_t count, const double* boxes, const uint8_t* flips, int32_t size,
                                  int32_t planar, int32_t filter, uint8_t* out, int8_t* statuses) {
    Workspace& workspace = *static_cast<Workspace*>(handle);
    for (int32_t i = 0; i < count; ++i) {
        if (i >= workspace.opened) {
            statuses[i] = static_cast<int8_t>(Status::bad_request);
            continue;
        }
        Image& image = *workspace.images[static_cast<size_t>(i)];
        Status status = image.status;
        if (status == Status::ok) {
            const double* box = boxes + 4 * static_cast<size_t>(i);
            const falconet::Request request{box[0],        box[1], box[2],      box[3],
                                            flips[i] != 0, size,   planar != 0, static_cast<falconet::Filter>(filter)};
            uint8_t* row = out + static_cast<size_t>(i) * static_cast<size_t>(size) * static_cast<size_t>(size) * 3;
            status = guarded([&] { return workspace.decoder.decode(image.file.data(), image.size, request, row); });
        }
        statuses[i] = static_cast<int8_t>(status);
        if (image.file.bytes() > kept_file_bytes) {
            image.file.release();
            image.status = Status::bad_request;  // until it is opened again
        }
    }
}

// Bytes of each of the files opened last; 0 for one whose status is not 0.
FALCONET_API void falconet_encoded_sizes(void* handle, int32_t count, int64_t* sizes) {
    const Workspace& workspace = *static_cast<Workspace*>(handle);
    for (int32_t i = 0; i < count; ++i) {
        const Image* image = i < workspace.opened ? workspace.images[static_cast<size_t>(i)].get() : nullptr;
        sizes[i] = image != nullptr && image->status == Status::ok ? static_cast<int64_t>(image->size) : 0;
    }
}

// The files opened last end to end, for another decoder; `out` has room for all of their sizes.
FALCONET_API void falconet_encoded(void* handle, int32_t count, uint8_t* out) {
    Workspace& workspace = *static_cast<Workspace*>(handle);
    for (int32_t i = 0; i < std::min(count, workspace.opened); ++i) {
        Image& image = *workspace.images[static_cast<size_t>(i)];
        if (image.status != Status::ok) continue;
        std::memcpy(out, image.file.data(), image.size);
        out += image.size;
        if (image.file.bytes() > kept_file_bytes) {
            image.file.release();
            image.status = Status::bad_request;  // until it is opened again
        }
    }
}

// The same picture with a restart marker after every `interval` MCUs and Huffman tables made for it. On success *result
// is memory that falconet_free takes back.
FALCONET_API int8_t falconet_restart_marked(const uint8_t* data, int64_t size, int32_t interval, int64_t most_pixels,
                                            uint8_t** result, int64_t* result_size) {
    const Status status = guarded([&] {
        std::vector<uint8_t> marked;
        const Status made = falconet::restart_marked(data, static_cast<size_t>(size), interval, most_pixels, marked);
        if (made != Status::ok) return made;
        *result = new uint8_t[marked.size()];
        std::memcpy(*result, marked.data(), marked.size());
        *result_size = static_cast<int64_t>(marked.size());
        return Status::ok;
    });
    return static_cast<int8_t>(status);
}

FALCONET_API void falconet_free(uint8_t* result) { delete[] result; }

FALCONET_API uint32_t falconet_crc32c(const uint8_t* data, int64_t size, int32_t portable) {
    const auto count = static_cast<size_t>(size);
    return portable != 0 ? falconet::crc32c_portable(data, count, 0) : falconet::crc32c(data, count, 0);
}

// stamps: count x (bytes, nanoseconds of the last change); -1 for what is not a file.
FALCONET_API void falconet_stamps(int32_t count, const char* const* paths, int64_t* stamps) {
    for (int32_t i = 0; i < count; ++i) {
        int64_t* stamp = stamps + 2 * static_cast<size_t>(i);
        if (!falconet::stamp_of(paths[i], stamp[0], stamp[1])) stamp[0] = stamp[1] = -1;
    }
}

// sizes: count x (width, height); states: count, see look.hpp.
FALCONET_API void falconet_look(int32_t count, const char* const* paths, int32_t* sizes, int8_t* states) {
    for (int32_t i = 0; i < count; ++i) {
        const falconet::Look found = falconet::look_at(paths[i]);
        sizes[2 * static_cast<size_t>(i)] = found.width;
        sizes[2 * static_cast<size_t>(i) + 1] = found.height;
        states[i] = static_cast<int8_t>(found.state);
    }
}
