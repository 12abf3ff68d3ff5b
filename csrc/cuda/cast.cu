// fw_cast: between fp32, bf16 and fp16.
#include "groups.h"

namespace {

template <bool kVector>
__global__ void __launch_bounds__(kThreads) cast(const void* src, int src_dtype, void* dst, int dst_dtype, int64_t n) {
  for (int64_t group = global_thread(); group * kGroup < n; group += global_threads()) {
    const Span span = span_of(group, 0, n);
    float x[kGroup];
    load_group<kVector>(src, src_dtype, span, x);
    store_group<kVector>(dst, dst_dtype, span, x);
  }
}

}  // namespace

FW_API int fw_cast(const void* src, int src_dtype, void* dst, int dst_dtype, int64_t n, void* stream) {
  if (!is_dtype(src_dtype) || !is_dtype(dst_dtype) || n < 0) return FW_INVALID;
  if (n == 0) return 0;
  const dim3 grid(looping_grid(divide_up(n, kGroup)));
  if (aligned_to_16(src, dst))
    FW_LAUNCH(cast<true>, grid, dim3(kThreads), 0, stream, src, src_dtype, dst, dst_dtype, n);
  else
    FW_LAUNCH(cast<false>, grid, dim3(kThreads), 0, stream, src, src_dtype, dst, dst_dtype, n);
  return FW_LAST_ERROR();
}
