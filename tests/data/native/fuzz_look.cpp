// What hostile files may not do to the look at headers, for libFuzzer or for the driver in fuzz_driver.cpp: the input
// is a whole file.
//
// Beyond what the sanitizers watch: a file that looks whole has a size, and one without bytes does not look whole.
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <string>

#include "look.hpp"

using falconet::State;

namespace {

void insist(bool holds, const char* what) {
    if (holds) return;
    std::fprintf(stderr, "not held: %s\n", what);
    std::abort();
}

int opened_file(std::string& path) {
    std::FILE* file = std::tmpfile();
    insist(file != nullptr, "there is a file");
    path = "/proc/self/fd/" + std::to_string(fileno(file));
    return fileno(file);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    static std::string path;
    static const int file = opened_file(path);
    insist(ftruncate(file, 0) == 0, "the file is emptied");
    insist(pwrite(file, data, size, 0) == static_cast<ssize_t>(size), "the file is written");
    int64_t bytes = 0, time = 0;
    insist(falconet::stamp_of(path.c_str(), bytes, time) && bytes == static_cast<int64_t>(size), "it has its size");
    const falconet::Look found = falconet::look_at(path.c_str());
    insist((found.state == State::empty) == (size == 0), "only an empty file is empty");
    insist(found.state != State::unreadable, "a file can be read");
    insist(found.state != State::whole || (found.width > 0 && found.height > 0), "what is whole has a size");
    return 0;
}
