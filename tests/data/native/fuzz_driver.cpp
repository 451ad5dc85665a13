// Drives fuzz.cpp where libFuzzer is not there: mutates the files of a folder for some seconds, the same way every
// time.
//   fuzz_driver FOLDER SECONDS SEED
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

namespace {

using Bytes = std::vector<uint8_t>;

struct Random {  // splitmix64
    uint64_t state;
    uint64_t next() {
        uint64_t z = state += 0x9E3779B97F4A7C15u;
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
        z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
        return z ^ (z >> 31);
    }
    size_t below(size_t n) { return n != 0 ? static_cast<size_t>(next() % n) : 0; }
};

void mutate(Bytes& bytes, const Bytes& other, Random& random) {
    static const uint8_t markers[] = {0x00, 0x01, 0xC0, 0xC1, 0xC2, 0xC4, 0xD0, 0xD7,
                                      0xD8, 0xD9, 0xDA, 0xDB, 0xDD, 0xEE, 0xFF};
    for (size_t changes = 1 + random.below(6); changes > 0 && !bytes.empty(); --changes) {
        // Half of the changes fall on the headers, where one byte decides most.
        const size_t at = random.below(random.next() % 2 == 0 ? std::min<size_t>(bytes.size(), 640) : bytes.size());
        switch (random.below(7)) {
            case 0: bytes[at] = static_cast<uint8_t>(random.next()); break;
            case 1: bytes[at] = static_cast<uint8_t>(bytes[at] ^ 1u << random.below(8)); break;
            case 2: bytes[at] = markers[random.below(sizeof markers)]; break;
            case 3: bytes.resize(at); break;
            case 4:
                bytes.erase(bytes.begin() + static_cast<ptrdiff_t>(at),
                            bytes.begin() + static_cast<ptrdiff_t>(std::min(bytes.size(), at + 1 + random.below(40))));
                break;
            case 5:
                bytes.insert(bytes.begin() + static_cast<ptrdiff_t>(at), 1 + random.below(8),
                             static_cast<uint8_t>(random.next()));
                break;
            default:  // a stretch of another image
                for (size_t i = random.below(other.size()), n = random.below(64);
                     n > 0 && i < other.size() && at + n < bytes.size(); ++i, --n)
                    bytes[at + n] = other[i];
        }
    }
}

}  // namespace

int main(int count, char** arguments) {
    if (count != 4) return 2;
    std::vector<Bytes> corpus;
    for (const auto& entry : std::filesystem::directory_iterator(arguments[1])) {
        std::ifstream file(entry.path(), std::ios::binary);
        corpus.emplace_back(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
    }
    if (corpus.empty()) return 2;
    for (const Bytes& bytes : corpus) LLVMFuzzerTestOneInput(bytes.data(), bytes.size());
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(std::atoi(arguments[2]));
    Random random{static_cast<uint64_t>(std::atoll(arguments[3]))};
    long runs = 0;
    for (; std::chrono::steady_clock::now() < end; ++runs) {
        Bytes bytes = corpus[random.below(corpus.size())];
        mutate(bytes, corpus[random.below(corpus.size())], random);
        LLVMFuzzerTestOneInput(bytes.data(), bytes.size());
    }
    std::printf("%ld inputs\n", runs);
    return 0;
}
