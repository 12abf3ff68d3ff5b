// Sums and maxima over the threads of a warp and of a block, in an order that depends on nothing: the same input gives the same bits.
#pragma once
#include "device.h"

struct Sum {
  template <class T>
  static __device__ __forceinline__ T combine(T a, T b) {
    return a + b;
  }
};

// A NaN on either side wins, unlike fmaxf.
struct Max {
  template <class T>
  static __device__ __forceinline__ T combine(T a, T b) {
    return a > b || a != a ? a : b;
  }
};

// Every lane gets the result. All lanes of the warp must take part.
template <class Op, class T>
static __device__ __forceinline__ T warp_reduce(T value) {
#pragma unroll
  for (int distance = kWarp / 2; distance; distance /= 2) value = Op::combine(value, __shfl_xor_sync(kAllLanes, value, distance));
  return value;
}

// Every thread gets the result. All threads of the block must take part. May be called again at once.
template <class Op, class T>
static __device__ __forceinline__ T block_reduce(T value, T neutral) {
  FW_SHARED(T, of_warp, kWarps);
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  value = warp_reduce<Op>(value);
  if (lane == 0) of_warp[warp] = value;
  __syncthreads();
  value = warp_reduce<Op>(lane < kWarps ? of_warp[lane] : neutral);
  __syncthreads();  // all have read before the next call writes
  return value;
}

template <class T>
static __device__ __forceinline__ T block_sum(T value) {
  return block_reduce<Sum>(value, T(0));
}
