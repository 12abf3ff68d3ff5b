// Kernels with one fault each, of the kinds that the emulator and the sanitizers are there to find. tests/kernels/test_sanitizers.py says
// which build must report which.
#include <stdlib.h>
#include <string.h>

#include "../../csrc/cuda/device.h"

namespace {

__global__ void missing_syncthreads(const float* x, float* y) {
  FW_SHARED(float, shared, 64);
  shared[threadIdx.x] = x[threadIdx.x];
  y[threadIdx.x] = shared[63 - threadIdx.x];
}

// A shuffle makes lanes meet, but orders nothing in memory.
__global__ void missing_syncwarp(const float* x, float* y) {
  FW_SHARED(float, shared, 32);
  shared[threadIdx.x] = x[threadIdx.x];
  const float zero = __shfl_xor_sync(kAllLanes, 0.0f, 1);
  y[threadIdx.x] = shared[31 - threadIdx.x] + zero;
}

__global__ void out_of_bounds_global(const float* x, float* y, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i <= n) y[i] = x[i];
}

__global__ void out_of_bounds_shared(float* y) {
  FW_SHARED(float, shared, 64);
  shared[threadIdx.x] = 1.0f;
  __syncthreads();
  y[threadIdx.x] = shared[threadIdx.x + 1];
}

__global__ void misaligned(const float* x, float* y) { y[threadIdx.x] = reinterpret_cast<const float4*>(x + 1)[threadIdx.x].x; }

__global__ void divergent_barrier(float* y) {
  if (threadIdx.x < 16) __syncthreads();
  y[threadIdx.x] = 1.0f;
  __syncthreads();
}

// Half of the threads wait for a block, the other half for a warp of which half waits for the block.
__global__ void barrier_never_reached(float* y) {
  if (threadIdx.x % 2)
    __syncthreads();
  else
    __syncwarp();
  y[threadIdx.x] = 1.0f;
}

__global__ void lane_outside_its_mask(float* y) { y[threadIdx.x] = __shfl_sync(0xffffu, 1.0f, 0); }

__global__ void mask_with_absent_lanes(float* y) {
  if (threadIdx.x < 16) y[threadIdx.x] = __shfl_xor_sync(kAllLanes, 1.0f, 1);
}

__global__ void uninitialised_shared(float* y) {
  FW_SHARED(float, shared, 64);
  if (threadIdx.x < 63) shared[threadIdx.x] = 1.0f;
  __syncthreads();
  y[threadIdx.x] = shared[threadIdx.x];
}

__global__ void race_of_blocks(float* y) {
  if (threadIdx.x == 0) y[0] += 1.0f;
}

__global__ void int_overflow(float* y, int rows, int cols) {
  const int last = rows * cols - 1;
  y[0] = last > 0 ? 1.0f : 0.0f;
}

__global__ void too_much_shared(float* y) {
  FW_SHARED(float, shared, 13000);
  shared[threadIdx.x] = 1.0f;
  y[threadIdx.x] = shared[threadIdx.x];
}

__global__ void nothing_wrong(const float* x, float* y) {
  FW_SHARED(float, shared, 64);
  shared[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  y[threadIdx.x] = shared[63 - threadIdx.x];
}

}  // namespace

// 0: nothing was noticed; 1: a wrong value came out; else the launch's error, about which the emulator has a report.
extern "C" __attribute__((visibility("default"))) int run_planted_fault(const char* name) {
  float* in = static_cast<float*>(malloc(256 * sizeof(float)));
  float* out = static_cast<float*>(malloc(256 * sizeof(float)));
  for (int i = 0; i < 256; i++) in[i] = 1.0f, out[i] = 0.0f;
  const dim3 one(1), warp(32), block(64);
  void* stream = nullptr;
  int checked = 0;  // outputs that must be 1
  const auto is = [&](const char* other) { return strcmp(name, other) == 0; };
  if (is("missing_syncthreads")) FW_LAUNCH(missing_syncthreads, one, block, 0, stream, in, out), checked = 64;
  if (is("missing_syncwarp")) FW_LAUNCH(missing_syncwarp, one, warp, 0, stream, in, out), checked = 32;
  if (is("out_of_bounds_global")) FW_LAUNCH(out_of_bounds_global, dim3(5), block, 0, stream, in, out, 256);
  if (is("out_of_bounds_shared")) FW_LAUNCH(out_of_bounds_shared, one, block, 0, stream, out);
  if (is("misaligned")) FW_LAUNCH(misaligned, one, warp, 0, stream, in, out);
  if (is("divergent_barrier")) FW_LAUNCH(divergent_barrier, one, block, 0, stream, out);
  if (is("barrier_never_reached")) FW_LAUNCH(barrier_never_reached, one, block, 0, stream, out);
  if (is("lane_outside_its_mask")) FW_LAUNCH(lane_outside_its_mask, one, block, 0, stream, out);
  if (is("mask_with_absent_lanes")) FW_LAUNCH(mask_with_absent_lanes, one, warp, 0, stream, out);
  if (is("uninitialised_shared")) FW_LAUNCH(uninitialised_shared, one, block, 0, stream, out), checked = 64;
  if (is("race_of_blocks")) FW_LAUNCH(race_of_blocks, dim3(4), warp, 0, stream, out);
  if (is("int_overflow")) FW_LAUNCH(int_overflow, one, dim3(1), 0, stream, out, 100000, 100000);
  if (is("too_much_shared")) FW_LAUNCH(too_much_shared, one, block, 0, stream, out);
  if (is("impossible_launch")) FW_LAUNCH(nothing_wrong, one, dim3(2048), 0, stream, in, out);
  if (is("nothing_wrong")) FW_LAUNCH(nothing_wrong, one, block, 0, stream, in, out), checked = 64;
  const int error = FW_LAST_ERROR();
  bool wrong = false;
  for (int i = 0; i < checked; i++) wrong |= !(out[i] == 1.0f);
  free(in);
  free(out);
  return error ? error : wrong;
}
