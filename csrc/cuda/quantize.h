// One quantisation block, done by one warp: scale from the largest absolute value, then integers of 8 or 4 bits. Format:
// framework_kernels.h.
//
// Values come from a function of the element number, so that one loop serves tensors, sums of dequantised parts and optimizers' masters. It
// is called twice per element, first for the maximum and then for the integers; the second time its memory is in the cache.
#pragma once
#include "groups.h"
#include "reduce.h"

struct QuantizedBlocks {
  void* q;
  float* scales;
  int bits, block;
};

static inline bool is_quantization(int bits, int block) { return block > 0 && (bits == 8 || (bits == 4 && block % 2 == 0)); }

static __device__ __forceinline__ int quantized(float value, float inverse_scale, float limit) {
  return static_cast<int>(fminf(fmaxf(rintf(value * inverse_scale), -limit), limit));
}

// Value of element i from `q`.
static __device__ __forceinline__ int unpacked(const void* q, int bits, int64_t i) {
  if (bits == 8) return static_cast<const int8_t*>(q)[i];
  const int byte = static_cast<const uint8_t*>(q)[i / 2];
  return ((i % 2 ? byte >> 4 : byte & 15) ^ 8) - 8;
}

struct NoResidual {
  __device__ __forceinline__ void operator()(int64_t, float) const {}
};

// All lanes of a warp, together. Elements from `n` on count as zero and are not written. `residual(i, error)` gets what rounding lost.
template <class Value, class Residual = NoResidual>
static __device__ __forceinline__ void quantize_block(const QuantizedBlocks& target, int64_t index, int64_t n, const Value& value,
                                                      const Residual& residual = Residual()) {
  const int lane = threadIdx.x % kWarp;
  const int64_t start = index * target.block;
  const int64_t stop = start + target.block < n ? start + target.block : n;
  const float limit = target.bits == 8 ? 127.0f : 7.0f;
  float largest = 0.0f;
  for (int64_t i = start + lane; i < stop; i += kWarp) largest = Max::combine(fabsf(value(i)), largest);
  largest = warp_reduce<Max>(largest);
  __syncwarp();  // all have read what `residual` may overwrite
  const bool finite = largest - largest == 0.0f;
  float scale = finite ? largest / limit : not_a_number();
  if (scale < 1.17549435e-38f) scale = 0.0f;
  const float inverse = scale > 0.0f ? 1.0f / scale : 0.0f;
  if (lane == 0) target.scales[index] = scale;
  if (target.bits == 8) {
    int8_t* q = static_cast<int8_t*>(target.q);
    for (int64_t i = start + lane; i < stop; i += kWarp) {
      const float v = finite ? value(i) : 0.0f;
      const int rounded = quantized(v, inverse, limit);
      q[i] = static_cast<int8_t>(rounded);
      if (finite) residual(i, v - static_cast<float>(rounded) * scale);
    }
    return;
  }
  uint8_t* q = static_cast<uint8_t*>(target.q);
  for (int64_t pair = start / 2 + lane; 2 * pair < stop; pair += kWarp) {
    int nibbles[2] = {0, 0};
#pragma unroll
    for (int k = 0; k < 2; k++) {
      const int64_t i = 2 * pair + k;
      if (i >= stop) break;
      const float v = finite ? value(i) : 0.0f;
      nibbles[k] = quantized(v, inverse, limit);
      if (finite) residual(i, v - static_cast<float>(nibbles[k]) * scale);
    }
    q[pair] = static_cast<uint8_t>((nibbles[0] & 15) | (nibbles[1] & 15) << 4);
  }
}
