// What the CUDA library says of itself. The architectures, a string, come from the build (csrc/CMakeLists.txt).
#include "../include/framework_kernels.h"

FW_API int fw_abi_version(void) { return FW_ABI_VERSION; }

FW_API const char* fw_describe(void) {
#if !defined(__CUDACC__)
  return "cuda: emulated on the CPU";
#elif defined(FW_CUDA_ARCHITECTURES)
  return "cuda: " FW_CUDA_ARCHITECTURES;
#else
  return "cuda";
#endif
}
