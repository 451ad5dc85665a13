// Working memory that grows and is used again for the next image; never cleared, 64-byte aligned for the vectors.
#pragma once
#include <cstddef>
#include <new>

namespace falconet {

template <class T>
class Buffer {
public:
    Buffer() = default;
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;
    ~Buffer() { release(); }

    // Room for `count` values; what was there before is lost when it has to grow.
    T* need(size_t count) {
        if (count > capacity_) {
            release();
            const size_t wanted = count + count / 4 + 64;  // a little more, so that similar images fit too
            data_ = static_cast<T*>(::operator new(wanted * sizeof(T), alignment));
            capacity_ = wanted;
        }
        return data_;
    }
    T* data() const { return data_; }
    size_t bytes() const { return capacity_ * sizeof(T); }
    void release() {
        if (data_ != nullptr) ::operator delete(data_, alignment);
        data_ = nullptr;
        capacity_ = 0;
    }

private:
    static constexpr std::align_val_t alignment{64};
    T* data_ = nullptr;
    size_t capacity_ = 0;
};

}  // namespace falconet
