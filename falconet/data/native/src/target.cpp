// The inner loops for one kind of processor. The build compiles this file once as it is and, on x86, once more with
// AVX2 and BMI2 allowed. All it includes is private to it, and it uses no template of the standard library: nothing
// compiled for the newer processor can end up in code that runs on an older one.
#include "colour.hpp"
#include "scan.hpp"

namespace falconet {
#if defined(__AVX2__)
namespace avx2 {
extern const Kernels kernels;
const Kernels kernels = {"avx2", decode_scan, resize_across, transpose, finish};
}  // namespace avx2
#else
namespace portable {
extern const Kernels kernels;
const Kernels kernels = {"portable", decode_scan, resize_across, transpose, finish};
}  // namespace portable
#endif
}  // namespace falconet
