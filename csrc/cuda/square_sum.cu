// fw_square_sum: squares in fp64, one partial sum per block, then one block adds those in a fixed order.
//
// The number of blocks depends on n alone, and no atomics are used: the same tensor gives the same bits on every device and in every run.
#include "groups.h"
#include "reduce.h"

namespace {

constexpr int64_t kGroupsPerThread = 4;  // at least, before another block is worth its partial sum

template <bool kVector>
__global__ void __launch_bounds__(kThreads) partial_square_sums(const void* x, int dtype, int64_t n, double* partial) {
  double sum = 0.0;
  for (int64_t group = global_thread(); group * kGroup < n; group += global_threads()) {
    float v[kGroup];
    load_group<kVector>(x, dtype, span_of(group, 0, n), v);
#pragma unroll
    for (int i = 0; i < kGroup; i++) sum += static_cast<double>(v[i]) * static_cast<double>(v[i]);
  }
  sum = block_sum(sum);
  if (threadIdx.x == 0) partial[blockIdx.x] = sum;
}

__global__ void __launch_bounds__(kThreads) add_partial_sums(const double* partial, int count, double* out) {
  double sum = 0.0;
  for (int i = threadIdx.x; i < count; i += kThreads) sum += partial[i];
  sum = block_sum(sum);
  if (threadIdx.x == 0) *out = sum;
}

}  // namespace

FW_API int fw_square_sum(const void* x, int dtype, int64_t n, double* out, double* scratch, int64_t scratch_numel, void* stream) {
  if (!is_dtype(dtype) || n < 0 || !out || !scratch || scratch_numel < FW_SQUARE_SUM_SCRATCH) return FW_INVALID;
  const int64_t wanted = divide_up(n, kThreads * kGroup * kGroupsPerThread);
  const int blocks = static_cast<int>(wanted < FW_SQUARE_SUM_SCRATCH ? wanted : FW_SQUARE_SUM_SCRATCH);
  if (blocks > 0 && aligned_to_16(x))
    FW_LAUNCH(partial_square_sums<true>, dim3(blocks), dim3(kThreads), 0, stream, x, dtype, n, scratch);
  else if (blocks > 0)
    FW_LAUNCH(partial_square_sums<false>, dim3(blocks), dim3(kThreads), 0, stream, x, dtype, n, scratch);
  FW_LAUNCH(add_partial_sums, dim3(1), dim3(kThreads), 0, stream, scratch, blocks, out);
  return FW_LAST_ERROR();
}
