// fw_cross_entropy: softmax cross-entropy per row, the gradient written over the logits.
//
// One block a row, which is read once for maximum and sum together (online softmax, arXiv:1805.02867) and once more for the gradient.
#include "groups.h"
#include "reduce.h"

namespace {

constexpr int64_t kIgnoredLabel = -100;

// exp(x - maximum), where nothing but minus infinity has been seen 0.
static __device__ __forceinline__ float relative_exp(float x, float maximum) {
  return maximum == minus_infinity() ? 0.0f : expf(x - maximum);
}

template <bool kVector>
static __device__ void fill_row(void* row, int dtype, int64_t vocab, float value) {
  float x[kGroup];
#pragma unroll
  for (int i = 0; i < kGroup; i++) x[i] = value;
  for (int64_t group = threadIdx.x; group * kGroup < vocab; group += kThreads)
    store_group<kVector>(row, dtype, span_of(group, 0, vocab), x);
}

template <bool kVector>
__global__ void __launch_bounds__(kThreads) cross_entropy(void* logits, const int64_t* labels, float* loss, int64_t vocab,
                                                          int64_t row_stride, float grad_factor, int with_grad, int dtype) {
  const int64_t row_number = blockIdx.x, label = labels[row_number];
  char* row = static_cast<char*>(logits) + row_number * row_stride * bytes_of(dtype);
  if (label < 0 || label >= vocab) {  // all threads of the block
    const float value = label == kIgnoredLabel ? 0.0f : not_a_number();
    if (threadIdx.x == 0) loss[row_number] = value;
    if (with_grad) fill_row<kVector>(row, dtype, vocab, value);
    return;
  }

  float maximum = minus_infinity(), sum = 0.0f;
  for (int64_t group = threadIdx.x; group * kGroup < vocab; group += kThreads) {
    const Span span = span_of(group, 0, vocab);
    float x[kGroup];
    load_group<kVector>(row, dtype, span, x);
    float larger = maximum;
#pragma unroll
    for (int i = 0; i < kGroup; i++)
      if (span.wants(i)) larger = Max::combine(x[i], larger);
    sum *= relative_exp(maximum, larger);
    maximum = larger;
#pragma unroll
    for (int i = 0; i < kGroup; i++)
      if (span.wants(i)) sum += relative_exp(x[i], maximum);
  }
  float of_label = 0.0f;
  if (threadIdx.x == 0) of_label = load_element(row, dtype, label);  // before anybody writes: the barriers below come first
  const float row_maximum = block_reduce<Max>(maximum, minus_infinity());
  sum = block_sum(sum * relative_exp(maximum, row_maximum));
  if (threadIdx.x == 0) loss[row_number] = logf(sum) + row_maximum - of_label;
  if (!with_grad) return;

  const float factor = grad_factor / sum;
  for (int64_t group = threadIdx.x; group * kGroup < vocab; group += kThreads) {
    const Span span = span_of(group, 0, vocab);
    float x[kGroup];
    load_group<kVector>(row, dtype, span, x);
#pragma unroll
    for (int i = 0; i < kGroup; i++) {
      x[i] = relative_exp(x[i], row_maximum) * factor;
      if (span.first + i == label) x[i] -= grad_factor;
    }
    store_group<kVector>(row, dtype, span, x);
  }
}

}  // namespace

FW_API int fw_cross_entropy(void* logits, const int64_t* labels, float* loss, int64_t rows, int64_t vocab, int64_t row_stride,
                            float grad_factor, int with_grad, int dtype, void* stream) {
  if (!is_dtype(dtype) || rows < 0 || vocab < 1 || row_stride < vocab) return FW_INVALID;
  if (rows == 0) return 0;
  const dim3 grid(static_cast<unsigned>(rows)), block(kThreads);
  if (aligned_to_16(logits) && row_stride * bytes_of(dtype) % 16 == 0)
    FW_LAUNCH(cross_entropy<true>, grid, block, 0, stream, logits, labels, loss, vocab, row_stride, grad_factor, with_grad, dtype);
  else
    FW_LAUNCH(cross_entropy<false>, grid, block, 0, stream, logits, labels, loss, vocab, row_stride, grad_factor, with_grad, dtype);
  return FW_LAST_ERROR();
}
