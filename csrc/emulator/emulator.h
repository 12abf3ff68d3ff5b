// CUDA's language for g++: what csrc/cuda/device.h includes when nvcc is not the compiler, so that the same .cu file runs on a CPU in
// tests.
//
// Only what the kernels use is here; a missing intrinsic is a compile error, and is added below. Three macros of device.h stand for syntax
// that g++ cannot read: FW_SHARED, FW_DYNAMIC_SHARED and FW_LAUNCH. Runtime and rules: runtime.h, README.md.
#pragma once
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "runtime.h"

// ---- keywords
#define __global__
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __restrict__ __restrict

// ---- where a thread is
#define threadIdx (emulator::position.thread)
#define blockIdx (emulator::position.block)
#define blockDim (emulator::position.block_size)
#define gridDim (emulator::position.grid_size)

// ---- vectors, aligned as on a device: the undefined-behaviour sanitizer finds misaligned ones
#define FW_EMULATOR_VECTORS(type, name)                    \
  struct alignas(2 * sizeof(type)) name##2 { type x, y; }; \
  struct alignas(4 * sizeof(type)) name##4 { type x, y, z, w; };
FW_EMULATOR_VECTORS(float, float)
FW_EMULATOR_VECTORS(int, int)
FW_EMULATOR_VECTORS(unsigned, uint)
#undef FW_EMULATOR_VECTORS

// ---- barriers and warps
#define FW_EMULATOR_TEXT(x) #x
#define FW_EMULATOR_LINE(line) __FILE__ ":" FW_EMULATOR_TEXT(line)
#define FW_EMULATOR_HERE FW_EMULATOR_LINE(__LINE__)

#define __syncthreads() emulator::block_barrier(FW_EMULATOR_HERE)
#define __syncwarp(...) emulator::warp_barrier(emulator::mask_or_all(__VA_ARGS__), FW_EMULATOR_HERE)
#define __shfl_sync(mask, value, lane) emulator::exchange(mask, value, (lane) & 31, FW_EMULATOR_HERE)
#define __shfl_xor_sync(mask, value, bits) emulator::exchange(mask, value, emulator::lane() ^ (bits), FW_EMULATOR_HERE)
#define __shfl_down_sync(mask, value, delta) emulator::exchange(mask, value, emulator::lane_below(delta), FW_EMULATOR_HERE)
#define __ballot_sync(mask, predicate) emulator::ballot(mask, predicate, FW_EMULATOR_HERE)
#define __any_sync(mask, predicate) (__ballot_sync(mask, predicate) != 0)

namespace emulator {
inline unsigned mask_or_all(unsigned mask = ~0u) { return mask; }
inline int lane_below(int delta) { return lane() + delta < kWarpThreads ? lane() + delta : lane(); }
}  // namespace emulator

// ---- memory
#define FW_SHARED(type, name, count)                  \
  type(&name)[count] = ([]() -> type(&)[count] {      \
    static char key;                                  \
    return emulator::shared_array<type, count>(&key); \
  })()
#define FW_DYNAMIC_SHARED(type, name) type* name = reinterpret_cast<type*>(emulator::position.dynamic_shared)

template <class T>
inline T __ldg(const T* address) {
  return *address;
}
template <class T>
inline T atomicAdd(T* address, T value) {
  if constexpr (std::is_integral_v<T>) return __atomic_fetch_add(address, value, __ATOMIC_RELAXED);
  T seen, sum;
  __atomic_load(address, &seen, __ATOMIC_RELAXED);
  do sum = seen + value;
  while (!__atomic_compare_exchange(address, &seen, &sum, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
  return seen;
}
inline void __threadfence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }

// ---- arithmetic
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
inline float __fdividef(float a, float b) { return a / b; }
inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
inline float __uint_as_float(unsigned bits) {
  float value;
  __builtin_memcpy(&value, &bits, 4);
  return value;
}
inline unsigned __float_as_uint(float value) {
  unsigned bits;
  __builtin_memcpy(&bits, &value, 4);
  return bits;
}
// Round to nearest even, every NaN to one.
inline unsigned short emulated_bf16_bits(float value) {
  const unsigned bits = __float_as_uint(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fc0;
  return static_cast<unsigned short>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}
inline unsigned short emulated_fp16_bits(float value) {
  if (value != value) return 0x7e00;
  const _Float16 half = static_cast<_Float16>(value);
  unsigned short bits;
  __builtin_memcpy(&bits, &half, 2);
  return bits;
}
inline float emulated_fp16_value(unsigned short bits) {
  _Float16 half;
  __builtin_memcpy(&half, &bits, 2);
  return static_cast<float>(half);
}

// ---- launches
#define FW_LAUNCH(kernel, grid, block, shared_bytes, stream, ...) \
  ((void)(stream), emulator::launch(grid, block, shared_bytes, [&] { kernel(__VA_ARGS__); }))
#define FW_LAST_ERROR() emulator::last_error()
