// Groups of eight consecutive elements of a flat tensor, as floats: what one thread reads or writes at a time.
//
// The dtype is an argument and not a template parameter: all threads take the same branch, and these kernels wait for memory. A group whose
// elements are all wanted, of a tensor that starts at a multiple of 16 bytes, moves in 16-byte accesses; others element by element.
#pragma once
#include "../include/framework_kernels.h"
#include "device.h"

constexpr int kGroup = 8;

// Elements [begin, end) of the group that starts at element `first` are wanted.
struct Span {
  int64_t first;
  int begin, end;

  __device__ __forceinline__ bool whole() const { return begin == 0 && end == kGroup; }
  __device__ __forceinline__ bool wants(int i) const { return i >= begin && i < end; }
};

// The part of [start, stop) that lies in group number `group`.
static __device__ __forceinline__ Span span_of(int64_t group, int64_t start, int64_t stop) {
  const int64_t first = group * kGroup;
  return Span{first, first < start ? static_cast<int>(start - first) : 0, first + kGroup > stop ? static_cast<int>(stop - first) : kGroup};
}

template <class T>
static __device__ __forceinline__ void load_whole(const T* address, float (&x)[kGroup]) {
  if constexpr (sizeof(T) == 4) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const float4 four = reinterpret_cast<const float4*>(address)[half];
      x[4 * half] = four.x, x[4 * half + 1] = four.y, x[4 * half + 2] = four.z, x[4 * half + 3] = four.w;
    }
  } else {
    const uint4 four = *reinterpret_cast<const uint4*>(address);
    const uint32_t words[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
      x[2 * i] = to_float(T{static_cast<uint16_t>(words[i] & 0xffffu)});
      x[2 * i + 1] = to_float(T{static_cast<uint16_t>(words[i] >> 16)});
    }
  }
}

template <class T>
static __device__ __forceinline__ void store_whole(T* address, const float (&x)[kGroup]) {
  if constexpr (sizeof(T) == 4) {
#pragma unroll
    for (int half = 0; half < 2; half++)
      reinterpret_cast<float4*>(address)[half] = float4{x[4 * half], x[4 * half + 1], x[4 * half + 2], x[4 * half + 3]};
  } else {
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; i++) words[i] = from_float<T>(x[2 * i]).bits | static_cast<uint32_t>(from_float<T>(x[2 * i + 1]).bits) << 16;
    *reinterpret_cast<uint4*>(address) = uint4{words[0], words[1], words[2], words[3]};
  }
}

// Elements that are not wanted read as 0.
template <bool kVector, class T>
static __device__ __forceinline__ void load_group(const T* base, const Span& span, float (&x)[kGroup]) {
  if (kVector && span.whole()) {
    load_whole(base + span.first, x);
    return;
  }
#pragma unroll
  for (int i = 0; i < kGroup; i++) x[i] = span.wants(i) ? to_float(base[span.first + i]) : 0.0f;
}

template <bool kVector, class T>
static __device__ __forceinline__ void store_group(T* base, const Span& span, const float (&x)[kGroup]) {
  if (kVector && span.whole()) {
    store_whole(base + span.first, x);
    return;
  }
#pragma unroll
  for (int i = 0; i < kGroup; i++)
    if (span.wants(i)) base[span.first + i] = from_float<T>(x[i]);
}

template <bool kVector>
static __device__ __forceinline__ void load_group(const void* base, int dtype, const Span& span, float (&x)[kGroup]) {
  if (dtype == FW_F32)
    load_group<kVector>(static_cast<const float*>(base), span, x);
  else if (dtype == FW_BF16)
    load_group<kVector>(static_cast<const bf16*>(base), span, x);
  else
    load_group<kVector>(static_cast<const fp16*>(base), span, x);
}

template <bool kVector>
static __device__ __forceinline__ void store_group(void* base, int dtype, const Span& span, const float (&x)[kGroup]) {
  if (dtype == FW_F32)
    store_group<kVector>(static_cast<float*>(base), span, x);
  else if (dtype == FW_BF16)
    store_group<kVector>(static_cast<bf16*>(base), span, x);
  else
    store_group<kVector>(static_cast<fp16*>(base), span, x);
}

// One element.
static __device__ __forceinline__ float load_element(const void* base, int dtype, int64_t i) {
  if (dtype == FW_F32) return static_cast<const float*>(base)[i];
  return dtype == FW_BF16 ? to_float(static_cast<const bf16*>(base)[i]) : to_float(static_cast<const fp16*>(base)[i]);
}

static __device__ __forceinline__ void store_element(void* base, int dtype, int64_t i, float value) {
  if (dtype == FW_F32)
    static_cast<float*>(base)[i] = value;
  else if (dtype == FW_BF16)
    static_cast<bf16*>(base)[i] = from_float<bf16>(value);
  else
    static_cast<fp16*>(base)[i] = from_float<fp16>(value);
}

static __host__ __device__ __forceinline__ int64_t bytes_of(int dtype) { return dtype == FW_F32 ? 4 : 2; }

// ---- on the host
static inline bool is_dtype(int dtype) { return dtype == FW_F32 || dtype == FW_BF16 || dtype == FW_F16; }

// NULL counts as aligned: it is not accessed.
template <class... Pointers>
static inline bool aligned_to_16(Pointers... pointers) {
  return ((reinterpret_cast<uintptr_t>(pointers) % 16 == 0) && ...);
}

static inline int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Blocks for `work` threads' worth of work when a block may loop: enough to fill any device, and the same on every device.
static inline unsigned looping_grid(int64_t work) {
  const int64_t blocks = divide_up(work, kThreads);
  return static_cast<unsigned>(blocks < 1 ? 1 : blocks > 4096 ? 4096 : blocks);
}

// Number of this thread and of all threads of a looping launch.
static __device__ __forceinline__ int64_t global_thread() { return static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; }
static __device__ __forceinline__ int64_t global_threads() { return static_cast<int64_t>(gridDim.x) * kThreads; }
