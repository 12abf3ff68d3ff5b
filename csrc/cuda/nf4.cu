// fw_nf4_dequantize: QLoRA's NormalFloat4 (arXiv:2305.14314, appendix E), packed as bitsandbytes does.
#include "groups.h"

namespace {

static __device__ __forceinline__ float nf4_value(int index) {
  switch (index) {
    case 0:
      return -1.0f;
    case 1:
      return -0.6961928009986877f;
    case 2:
      return -0.5250730514526367f;
    case 3:
      return -0.39491748809814453f;
    case 4:
      return -0.28444138169288635f;
    case 5:
      return -0.18477343022823334f;
    case 6:
      return -0.09105003625154495f;
    case 7:
      return 0.0f;
    case 8:
      return 0.07958029955625534f;
    case 9:
      return 0.16093020141124725f;
    case 10:
      return 0.24611230194568634f;
    case 11:
      return 0.33791524171829224f;
    case 12:
      return 0.44070982933044434f;
    case 13:
      return 0.5626170039176941f;
    case 14:
      return 0.7229568362236023f;
    default:
      return 1.0f;
  }
}

template <bool kVector>
__global__ void __launch_bounds__(kThreads)
    nf4_dequantize(const uint8_t* q, const float* absmax, int64_t n, int block, void* out, int dtype) {
  FW_SHARED(float, table, 16);  // not constant memory, which would serve lanes that look up different entries one after another
  if (threadIdx.x < 16) table[threadIdx.x] = nf4_value(threadIdx.x);
  __syncthreads();
  for (int64_t group = global_thread(); group * kGroup < n; group += global_threads()) {
    const Span span = span_of(group, 0, n);
    const float first_scale = absmax[(span.first + span.begin) / block];
    float x[kGroup];
    if (kVector && span.whole()) {
      const uint32_t word = *reinterpret_cast<const uint32_t*>(q + span.first / 2);
#pragma unroll
      for (int i = 0; i < kGroup; i++) {
        const int nibble = word >> (i / 2 * 8 + (i % 2 ? 0 : 4)) & 15u;
        x[i] = table[nibble] * (block % kGroup == 0 ? first_scale : absmax[(span.first + i) / block]);
      }
    } else {
#pragma unroll
      for (int i = 0; i < kGroup; i++) {
        if (!span.wants(i)) {
          x[i] = 0.0f;
          continue;
        }
        const int64_t at = span.first + i;
        const int byte = q[at / 2];
        x[i] = table[at % 2 ? byte & 15 : byte >> 4] * absmax[at / block];
      }
    }
    store_group<kVector>(out, dtype, span, x);
  }
}

}  // namespace

FW_API int fw_nf4_dequantize(const uint8_t* q, const float* absmax, int64_t n, int block, void* out, int dtype, void* stream) {
  if (!is_dtype(dtype) || n < 0 || block <= 0 || block % 2) return FW_INVALID;
  if (n == 0) return 0;
  const dim3 grid(looping_grid(divide_up(n, kGroup)));
  if (aligned_to_16(q, out))
    FW_LAUNCH(nf4_dequantize<true>, grid, dim3(kThreads), 0, stream, q, absmax, n, block, out, dtype);
  else
    FW_LAUNCH(nf4_dequantize<false>, grid, dim3(kThreads), 0, stream, q, absmax, n, block, out, dtype);
  return FW_LAST_ERROR();
}
