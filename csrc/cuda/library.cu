// What the CUDA library says of itself. The architectures come from the build (csrc/CMakeLists.txt).
#include "../include/framework_kernels.h"

#define FW_TEXT_OF(x) #x
#define FW_TEXT(x) FW_TEXT_OF(x)

FW_API int fw_abi_version(void) { return FW_ABI_VERSION; }

FW_API const char* fw_describe(void) {
#if !defined(__CUDACC__)
  return "cuda: emulated on the CPU";
#elif defined(FW_CUDA_ARCHITECTURES)
  return "cuda: " FW_TEXT(FW_CUDA_ARCHITECTURES);
#else
  return "cuda";
#endif
}
