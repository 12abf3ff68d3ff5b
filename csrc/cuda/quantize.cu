// fw_quantize, fw_dequantize, fw_dequantize_sum_quantize: symmetric block quantisation with int8 or int4 (format: framework_kernels.h).
#include "quantize.h"

namespace {

struct TensorSource {
  const void* x;
  int dtype;
  const float* error;

  __device__ __forceinline__ float operator()(int64_t i) const { return load_element(x, dtype, i) + (error ? error[i] : 0.0f); }
};

// A warp's lane reads error[i] in its second pass just before it writes it here, so the feedback is updated in place.
struct ErrorFeedback {
  float* error;

  __device__ __forceinline__ void operator()(int64_t i, float lost) const {
    if (error) error[i] = lost;
  }
};

__global__ void __launch_bounds__(kThreads)
    quantize(TensorSource source, ErrorFeedback feedback, int64_t n, int64_t blocks, QuantizedBlocks target) {
  const int64_t index = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / kWarp;
  if (index < blocks) quantize_block(target, index, n, source, feedback);  // a whole warp
}

// `shift`: the block size is 2^shift, or -1.
static __device__ __forceinline__ int64_t block_of(int64_t i, int block, int shift) { return shift >= 0 ? i >> shift : i / block; }

template <bool kVector>
__global__ void __launch_bounds__(kThreads)
    dequantize(const void* q, int bits, const float* scales, int64_t n, int block, int shift, void* out, int dtype, int add) {
  for (int64_t group = global_thread(); group * kGroup < n; group += global_threads()) {
    const Span span = span_of(group, 0, n);
    float x[kGroup], sum[kGroup];
    if (add) load_group<kVector>(out, dtype, span, sum);
    if (kVector && span.whole()) {
      int integers[kGroup];
      if (bits == 8) {
        const uint2 two = *reinterpret_cast<const uint2*>(static_cast<const int8_t*>(q) + span.first);
#pragma unroll
        for (int i = 0; i < kGroup; i++) integers[i] = static_cast<int8_t>((i < 4 ? two.x : two.y) >> (i % 4 * 8) & 255u);
      } else {
        const uint32_t word = *reinterpret_cast<const uint32_t*>(static_cast<const uint8_t*>(q) + span.first / 2);
#pragma unroll
        for (int i = 0; i < kGroup; i++) integers[i] = static_cast<int>((word >> (4 * i) & 15u) ^ 8u) - 8;
      }
#pragma unroll
      for (int i = 0; i < kGroup; i++) x[i] = static_cast<float>(integers[i]) * scales[block_of(span.first + i, block, shift)];
    } else {
#pragma unroll
      for (int i = 0; i < kGroup; i++) {
        const int64_t at = span.first + i;
        x[i] = span.wants(i) ? static_cast<float>(unpacked(q, bits, at)) * scales[block_of(at, block, shift)] : 0.0f;
      }
    }
    if (add) {
#pragma unroll
      for (int i = 0; i < kGroup; i++) x[i] += sum[i];
    }
    store_group<kVector>(out, dtype, span, x);
  }
}

// Element i of the sum over parts, part 0 first.
struct PartsSource {
  const void* q;
  const float* scales;
  int64_t parts, bytes, blocks;
  int bits, block, shift;

  __device__ __forceinline__ float operator()(int64_t i) const {
    const int64_t index = block_of(i, block, shift);
    float sum = 0.0f;
    for (int64_t part = 0; part < parts; part++) {
      const int integer = unpacked(static_cast<const uint8_t*>(q) + part * bytes, bits, i);
      sum += static_cast<float>(integer) * scales[part * blocks + index];
    }
    return sum;
  }
};

__global__ void __launch_bounds__(kThreads)
    sum_and_quantize(PartsSource source, int64_t n, QuantizedBlocks target, void* sum_out, int sum_dtype) {
  const int64_t index = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / kWarp;
  if (index >= source.blocks) return;  // a whole warp
  if (target.q) quantize_block(target, index, n, source);
  if (!sum_out) return;
  const int64_t start = index * source.block;
  const int64_t stop = start + source.block < n ? start + source.block : n;
  for (int64_t i = start + threadIdx.x % kWarp; i < stop; i += kWarp) store_element(sum_out, sum_dtype, i, source(i));
}

int shift_of(int block) {
  for (int shift = 0; shift < 31; shift++)
    if (block == 1 << shift) return shift;
  return -1;
}

dim3 grid_of_warps(int64_t warps) { return dim3(static_cast<unsigned>(divide_up(warps, kWarps))); }

}  // namespace

FW_API int fw_quantize(const void* x, int dtype, int64_t n, int bits, int block, void* q, float* scales, float* error, void* stream) {
  if (!is_dtype(dtype) || n < 0 || !is_quantization(bits, block)) return FW_INVALID;
  if (n == 0) return 0;
  const int64_t blocks = divide_up(n, block);
  FW_LAUNCH(quantize, grid_of_warps(blocks), dim3(kThreads), 0, stream, TensorSource{x, dtype, error}, ErrorFeedback{error}, n, blocks,
            QuantizedBlocks{q, scales, bits, block});
  return FW_LAST_ERROR();
}

FW_API int fw_dequantize(const void* q, int bits, const float* scales, int64_t n, int block, void* out, int dtype, int add, void* stream) {
  if (!is_dtype(dtype) || n < 0 || !is_quantization(bits, block)) return FW_INVALID;
  if (n == 0) return 0;
  const dim3 grid(looping_grid(divide_up(n, kGroup)));
  if (aligned_to_16(q, out))
    FW_LAUNCH(dequantize<true>, grid, dim3(kThreads), 0, stream, q, bits, scales, n, block, shift_of(block), out, dtype, add);
  else
    FW_LAUNCH(dequantize<false>, grid, dim3(kThreads), 0, stream, q, bits, scales, n, block, shift_of(block), out, dtype, add);
  return FW_LAST_ERROR();
}

FW_API int fw_dequantize_sum_quantize(const void* q, const float* scales, int64_t parts, int64_t n, int bits, int block, void* q_out,
                                      float* scales_out, void* sum_out, int sum_dtype, void* stream) {
  if (n < 0 || parts < 0 || !is_quantization(bits, block) || (sum_out && !is_dtype(sum_dtype)) || !q_out != !scales_out) return FW_INVALID;
  if (n == 0) return 0;
  const int64_t blocks = divide_up(n, block), bytes = bits == 8 ? n : divide_up(n, 2);
  const PartsSource source{q, scales, parts, bytes, blocks, bits, block, shift_of(block)};
  FW_LAUNCH(sum_and_quantize, grid_of_warps(blocks), dim3(kThreads), 0, stream, source, n, QuantizedBlocks{q_out, scales_out, bits, block},
            sum_out, sum_dtype);
  return FW_LAST_ERROR();
}
