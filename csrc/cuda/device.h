// The one header between a kernel and its compiler: nvcc for a device, or g++ over csrc/emulator, which runs every CUDA thread on the CPU.
//
// A thin veneer: CUDA's own names everywhere, and macros only for what g++ cannot parse (shared memory, <<<>>>). Conversions of the 16-bit
// types are here because their headers exist for nvcc only. No torch, no allocation, no synchronisation: a function of the library
// launches on the stream it is given and returns.
#pragma once
#include <stdint.h>

#include <type_traits>

#if defined(__CUDACC__)
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#define FW_SHARED(type, name, count) __shared__ type name[count]
#define FW_DYNAMIC_SHARED(type, name)                                \
  extern __shared__ __align__(16) unsigned char fw_dynamic_shared[]; \
  type* name = reinterpret_cast<type*>(fw_dynamic_shared)
#define FW_LAUNCH(kernel, grid, block, shared_bytes, stream, ...) \
  kernel<<<grid, block, shared_bytes, static_cast<cudaStream_t>(stream)>>>(__VA_ARGS__)
#define FW_LAST_ERROR() static_cast<int>(cudaGetLastError())
#else
#include "../emulator/emulator.h"
#endif

// Threads of a block, in all kernels. Tests under the thread sanitizer, where a thread costs milliseconds, take fewer.
#if !defined(FW_BLOCK_THREADS)
#define FW_BLOCK_THREADS 256
#endif
constexpr int kThreads = FW_BLOCK_THREADS;
constexpr int kWarp = 32;
constexpr int kWarps = kThreads / kWarp;
constexpr unsigned kAllLanes = 0xffffffffu;

static __device__ __forceinline__ float minus_infinity() { return __uint_as_float(0xff800000u); }
static __device__ __forceinline__ float not_a_number() { return __uint_as_float(0x7fc00000u); }

// Storage of one 16-bit number; arithmetic is in float.
struct bf16 {
  uint16_t bits;
};
struct fp16 {
  uint16_t bits;
};

static __device__ __forceinline__ float to_float(float x) { return x; }
static __device__ __forceinline__ float to_float(bf16 x) { return __uint_as_float(static_cast<uint32_t>(x.bits) << 16); }
static __device__ __forceinline__ float to_float(fp16 x) {
#if defined(__CUDACC__)
  return __half2float(__ushort_as_half(x.bits));
#else
  return emulated_fp16_value(x.bits);
#endif
}

// Round to nearest even. Every NaN becomes the same one, as in the CPU library: a device's own conversion makes others of it.
template <class T>
static __device__ __forceinline__ T from_float(float x) {
  if constexpr (std::is_same<T, bf16>::value) {
#if defined(__CUDACC__)
    return bf16{x != x ? static_cast<uint16_t>(0x7fc0) : __bfloat16_as_ushort(__float2bfloat16_rn(x))};
#else
    return bf16{emulated_bf16_bits(x)};
#endif
  } else if constexpr (std::is_same<T, fp16>::value) {
#if defined(__CUDACC__)
    return fp16{x != x ? static_cast<uint16_t>(0x7e00) : __half_as_ushort(__float2half_rn(x))};
#else
    return fp16{emulated_fp16_bits(x)};
#endif
  } else {
    return x;
  }
}
