// fw_top_k: keeps the k entries of each row that are largest in absolute value (Q-Sparse, arXiv:2407.10969) and makes the others 0.
//
// One block a row. The k-th largest is found by radix selection: the bits of |x| as an integer have the order of |x|, and four counts of
// eight bits each narrow it down. Among entries equal to it, those with the lower index are kept, so that exactly k remain.
#include "groups.h"
#include "reduce.h"

namespace {

constexpr int kBins = 256;

static __device__ __forceinline__ uint32_t key_of(float x) { return __float_as_uint(x) & 0x7fffffffu; }

__global__ void __launch_bounds__(kThreads) top_k(const void* x, void* y, int64_t cols, int64_t k, int dtype) {
  FW_SHARED(int, counts, kBins);
  FW_SHARED(int64_t, found, 2);  // the chosen bin, and how many entries of it are kept
  FW_SHARED(int, of_warp, kWarps);
  const int64_t bytes = bytes_of(dtype);
  const char* row = static_cast<const char*>(x) + blockIdx.x * cols * bytes;
  char* out = static_cast<char*>(y) + blockIdx.x * cols * bytes;

  uint32_t chosen = 0, decided = 0;  // bits of the k-th largest key that are known, and which those are
  int64_t wanted = k;                // it is the wanted-th largest of the keys that agree with `chosen`
  for (int shift = 24; shift >= 0; shift -= 8) {
    for (int bin = threadIdx.x; bin < kBins; bin += kThreads) counts[bin] = 0;
    __syncthreads();
    for (int64_t i = threadIdx.x; i < cols; i += kThreads) {
      const uint32_t key = key_of(load_element(row, dtype, i));
      if ((key & decided) == chosen) atomicAdd(&counts[key >> shift & 255u], 1);
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      int bin = kBins - 1;
      int64_t left = wanted;
      while (left > counts[bin]) left -= counts[bin--];
      found[0] = bin;
      found[1] = left;
    }
    __syncthreads();
    chosen |= static_cast<uint32_t>(found[0]) << shift;
    decided |= 255u << shift;
    wanted = found[1];
    __syncthreads();
  }

  int64_t equal_before = 0;  // entries equal to the k-th largest in the tiles before
  for (int64_t tile = 0; tile < cols; tile += kThreads) {
    const int64_t i = tile + threadIdx.x;
    const float value = i < cols ? load_element(row, dtype, i) : 0.0f;
    const bool equal = i < cols && key_of(value) == chosen;
    const unsigned votes = __ballot_sync(kAllLanes, equal);
    const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
    if (lane == 0) of_warp[warp] = __popc(votes);
    __syncthreads();
    int before = __popc(votes & ((1u << lane) - 1u)), in_tile = 0;
#pragma unroll
    for (int w = 0; w < kWarps; w++) {
      before += w < warp ? of_warp[w] : 0;
      in_tile += of_warp[w];
    }
    __syncthreads();
    if (i < cols) {
      const float kept = key_of(value) > chosen || (equal && equal_before + before < wanted) ? value : 0.0f;
      store_element(out, dtype, i, kept);
    }
    equal_before += in_tile;
  }
}

}  // namespace

FW_API int fw_top_k(const void* x, void* y, int64_t rows, int64_t cols, int64_t k, int dtype, void* stream) {
  if (!is_dtype(dtype) || rows < 0 || cols < 0 || cols > 0x7fffffff || k < 1 || k > cols) return FW_INVALID;
  if (rows == 0) return 0;
  FW_LAUNCH(top_k, dim3(static_cast<unsigned>(rows)), dim3(kThreads), 0, stream, x, y, cols, k, dtype);
  return FW_LAST_ERROR();
}
