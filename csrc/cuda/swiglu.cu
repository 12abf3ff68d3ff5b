// fw_swiglu_forward, fw_swiglu_backward: silu(gate) * up (arXiv:2002.05202). The backward pass makes silu again instead of keeping it.
#include "groups.h"

namespace {

static __device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

template <bool kVector>
__global__ void __launch_bounds__(kThreads) swiglu_forward(const void* gate, const void* up, void* y, int64_t n, int dtype) {
  for (int64_t group = global_thread(); group * kGroup < n; group += global_threads()) {
    const Span span = span_of(group, 0, n);
    float g[kGroup], u[kGroup];
    load_group<kVector>(gate, dtype, span, g);
    load_group<kVector>(up, dtype, span, u);
#pragma unroll
    for (int i = 0; i < kGroup; i++) g[i] = g[i] * sigmoid(g[i]) * u[i];
    store_group<kVector>(y, dtype, span, g);
  }
}

template <bool kVector>
__global__ void __launch_bounds__(kThreads)
    swiglu_backward(const void* dy, const void* gate, const void* up, void* dgate, void* dup, int64_t n, int dtype) {
  for (int64_t group = global_thread(); group * kGroup < n; group += global_threads()) {
    const Span span = span_of(group, 0, n);
    float d[kGroup], g[kGroup], u[kGroup];
    load_group<kVector>(dy, dtype, span, d);
    load_group<kVector>(gate, dtype, span, g);
    load_group<kVector>(up, dtype, span, u);
#pragma unroll
    for (int i = 0; i < kGroup; i++) {
      const float s = sigmoid(g[i]), silu = g[i] * s;
      const float of_gate = d[i] * u[i] * (s + silu * (1.0f - s));
      u[i] = d[i] * silu;
      g[i] = of_gate;
    }
    store_group<kVector>(dgate, dtype, span, g);
    store_group<kVector>(dup, dtype, span, u);
  }
}

}  // namespace

FW_API int fw_swiglu_forward(const void* gate, const void* up, void* y, int64_t n, int dtype, void* stream) {
  if (!is_dtype(dtype) || n < 0) return FW_INVALID;
  if (n == 0) return 0;
  const dim3 grid(looping_grid(divide_up(n, kGroup))), block(kThreads);
  if (aligned_to_16(gate, up, y))
    FW_LAUNCH(swiglu_forward<true>, grid, block, 0, stream, gate, up, y, n, dtype);
  else
    FW_LAUNCH(swiglu_forward<false>, grid, block, 0, stream, gate, up, y, n, dtype);
  return FW_LAST_ERROR();
}

FW_API int fw_swiglu_backward(const void* dy, const void* gate, const void* up, void* dgate, void* dup, int64_t n, int dtype,
                              void* stream) {
  if (!is_dtype(dtype) || n < 0) return FW_INVALID;
  if (n == 0) return 0;
  const dim3 grid(looping_grid(divide_up(n, kGroup))), block(kThreads);
  if (aligned_to_16(dy, gate, up, dgate, dup))
    FW_LAUNCH(swiglu_backward<true>, grid, block, 0, stream, dy, gate, up, dgate, dup, n, dtype);
  else
    FW_LAUNCH(swiglu_backward<false>, grid, block, 0, stream, dy, gate, up, dgate, dup, n, dtype);
  return FW_LAST_ERROR();
}
