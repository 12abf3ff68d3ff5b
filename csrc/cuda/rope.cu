// fw_rope: rotary position embedding (arXiv:2104.09864) of pairs (i, i + head_dim / 2), as in Hugging Face weights.
//
// A thread turns eight pairs: a group of the first half of a head and its partner in the second.
#include "groups.h"

namespace {

// Sizes as Index: 32-bit division is several times faster, and enough unless a tensor is huge.
template <class Index, bool kVector>
__global__ void __launch_bounds__(kThreads) rope(const void* x, const float* cos, const float* sin, void* y, Index items, Index groups,
                                                 Index heads, Index tokens, int64_t half, int64_t cos_batch_stride, float sign, int dtype) {
  for (int64_t item = global_thread(); item < static_cast<int64_t>(items); item += global_threads()) {
    const Index head_number = static_cast<Index>(item) / groups;  // over batch, tokens and heads
    const Index group = static_cast<Index>(item) - head_number * groups;
    const Index token_number = head_number / heads;  // over batch and tokens
    const Index batch = token_number / tokens, token = token_number - batch * tokens;
    const int64_t table = static_cast<int64_t>(batch) * cos_batch_stride + static_cast<int64_t>(token) * half;
    const Span span = span_of(group, 0, half);
    const int64_t bytes = bytes_of(dtype);
    const int64_t first_half = static_cast<int64_t>(head_number) * 2 * half * bytes, second_half = first_half + half * bytes;
    float a[kGroup], b[kGroup], c[kGroup], s[kGroup];
    load_group<kVector>(static_cast<const char*>(x) + first_half, dtype, span, a);
    load_group<kVector>(static_cast<const char*>(x) + second_half, dtype, span, b);
    load_group<kVector>(cos + table, span, c);
    load_group<kVector>(sin + table, span, s);
#pragma unroll
    for (int i = 0; i < kGroup; i++) {
      const float first = a[i] * c[i] - b[i] * (sign * s[i]);
      b[i] = b[i] * c[i] + a[i] * (sign * s[i]);
      a[i] = first;
    }
    store_group<kVector>(static_cast<char*>(y) + first_half, dtype, span, a);
    store_group<kVector>(static_cast<char*>(y) + second_half, dtype, span, b);
  }
}

}  // namespace

FW_API int fw_rope(const void* x, const float* cos, const float* sin, void* y, int64_t batch, int64_t tokens, int64_t heads,
                   int64_t head_dim, int64_t cos_batch_stride, int inverse, int dtype, void* stream) {
  if (!is_dtype(dtype) || batch < 0 || tokens < 0 || heads < 0 || head_dim < 0 || head_dim % 2) return FW_INVALID;
  const int64_t half = head_dim / 2, groups = divide_up(half, kGroup), items = batch * tokens * heads * groups;
  if (items == 0) return 0;
  const bool vector = half % kGroup == 0 && cos_batch_stride % 4 == 0 && aligned_to_16(x, cos, sin, y);
  const float sign = inverse ? -1.0f : 1.0f;
  const dim3 grid(looping_grid(items)), block(kThreads);
#define FW_ROPE(Index, vector)                                                                                                    \
  FW_LAUNCH((rope<Index, vector>), grid, block, 0, stream, x, cos, sin, y, static_cast<Index>(items), static_cast<Index>(groups), \
            static_cast<Index>(heads), static_cast<Index>(tokens), half, cos_batch_stride, sign, dtype)
  if (items > 0x7fffffff) {
    if (vector)
      FW_ROPE(int64_t, true);
    else
      FW_ROPE(int64_t, false);
  } else if (vector) {
    FW_ROPE(uint32_t, true);
  } else {
    FW_ROPE(uint32_t, false);
  }
#undef FW_ROPE
  return FW_LAST_ERROR();
}
