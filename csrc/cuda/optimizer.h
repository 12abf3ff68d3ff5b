// The loop that all optimizers share: elements of many ranges of a flat shard, one pass over parameters, gradients and state.
//
// An optimizer is a rule (see adamw.cu): how many state tensors it has, and how one element changes. The table of ranges travels by value
// with the launch, so nothing is copied to the device and the host waits for nothing; long tables go in several launches.
//
// Unusual: whether to do anything at all is read from the device (`grad_factor`), because only the device knows if the gradients were
// finite.
#pragma once
#include "groups.h"
#include "quantize.h"

constexpr int kTableRanges = 90;  // with the other arguments just below the 4 KiB of parameters that every device takes

struct Range {
  int64_t first_tile;  // number of the block that does the first tile of this range
  int64_t start, stop;
  float lr, weight_decay, bias_correction1, bias_correction2_sqrt;
};

struct RangeTable {
  Range ranges[kTableRanges];
  int count;
};

// Everything a launch works on. `state` has the rule's number of tensors.
struct Shard {
  float* master;
  uint16_t* remainder;
  float* state[2];
  const void* grad;
  int grad_dtype;
  void* copy;
  int copy_dtype;
  const float* grad_factor;
};

static __device__ __forceinline__ bool is_finite(float x) { return x - x == 0.0f; }

// ---- a parameter as bf16 copy and remainder: bits = (copy << 16) + (int16)remainder. The copy is the same where the remainder is not kept.
static __device__ __forceinline__ float joined(float copy, uint16_t remainder) {
  const int low = static_cast<int16_t>(remainder);
  return __uint_as_float(__float_as_uint(copy) + static_cast<uint32_t>(low));
}

static __device__ __forceinline__ void split(float value, uint16_t& copy, uint16_t& remainder) {
  uint32_t bits = __float_as_uint(value);
  if (value != value) bits = __float_as_uint(not_a_number());
  copy = static_cast<uint16_t>((bits + 0x8000u) >> 16);
  remainder = static_cast<uint16_t>(bits & 0xffffu);  // modulo 2^16, which is what the signed difference is
}

template <bool kVector>
static __device__ __forceinline__ void load_master(const Shard& shard, const Span& span, float (&p)[kGroup]) {
  if (shard.master) {
    load_group<kVector>(shard.master, span, p);
    return;
  }
  load_group<kVector>(static_cast<const bf16*>(shard.copy), span, p);
  if (!shard.remainder) return;
  uint16_t remainder[kGroup];
  if (kVector && span.whole()) {
    const uint4 four = *reinterpret_cast<const uint4*>(shard.remainder + span.first);
    const uint32_t words[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
    for (int i = 0; i < kGroup; i++) remainder[i] = static_cast<uint16_t>(words[i / 2] >> (i % 2 * 16));
  } else {
#pragma unroll
    for (int i = 0; i < kGroup; i++) remainder[i] = span.wants(i) ? shard.remainder[span.first + i] : 0;
  }
#pragma unroll
  for (int i = 0; i < kGroup; i++) p[i] = joined(p[i], remainder[i]);
}

template <bool kVector>
static __device__ __forceinline__ void store_master(const Shard& shard, const Span& span, const float (&p)[kGroup]) {
  if (shard.master) {
    store_group<kVector>(shard.master, span, p);
    if (shard.copy && shard.copy_dtype != FW_BF16) store_group<kVector>(shard.copy, shard.copy_dtype, span, p);
    if (!shard.copy || shard.copy_dtype != FW_BF16) return;
  }
  uint16_t copies[kGroup], remainders[kGroup];
#pragma unroll
  for (int i = 0; i < kGroup; i++) split(p[i], copies[i], remainders[i]);
  uint16_t* copy = static_cast<uint16_t*>(shard.copy);
  if (kVector && span.whole()) {
    uint32_t high[4], low[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      high[i] = copies[2 * i] | static_cast<uint32_t>(copies[2 * i + 1]) << 16;
      low[i] = remainders[2 * i] | static_cast<uint32_t>(remainders[2 * i + 1]) << 16;
    }
    *reinterpret_cast<uint4*>(copy + span.first) = uint4{high[0], high[1], high[2], high[3]};
    if (shard.remainder) *reinterpret_cast<uint4*>(shard.remainder + span.first) = uint4{low[0], low[1], low[2], low[3]};
    return;
  }
#pragma unroll
  for (int i = 0; i < kGroup; i++) {
    if (!span.wants(i)) continue;
    copy[span.first + i] = copies[i];
    if (shard.remainder) shard.remainder[span.first + i] = remainders[i];
  }
}

// Which range of the table does tile number `tile` belong to?
static __device__ __forceinline__ int range_of(const RangeTable& table, int64_t tile) {
  int low = 0, high = table.count;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (table.ranges[middle].first_tile <= tile)
      low = middle;
    else
      high = middle;
  }
  return low;
}

// One block a tile, one thread a group. Groups are counted from element 0 of the shard, so a range's first and last may be partial.
template <class Rule, bool kVector>
__global__ void __launch_bounds__(kThreads) update(Shard shard, RangeTable table, Rule rule) {
  const float factor = shard.grad_factor ? *shard.grad_factor : 1.0f;
  if (!is_finite(factor)) return;
  const Range& range = table.ranges[range_of(table, blockIdx.x)];
  const int64_t group = range.start / kGroup + (blockIdx.x - range.first_tile) * kThreads + threadIdx.x;
  if (group * kGroup >= range.stop) return;
  const Span span = span_of(group, range.start, range.stop);
  float p[kGroup], g[kGroup], state[2][kGroup];
  load_master<kVector>(shard, span, p);
  load_group<kVector>(shard.grad, shard.grad_dtype, span, g);
#pragma unroll
  for (int k = 0; k < Rule::kStates; k++) load_group<kVector>(shard.state[k], span, state[k]);
#pragma unroll
  for (int i = 0; i < kGroup; i++) rule.element(range, p[i], g[i] * factor, state[0][i], state[1][i]);
  store_master<kVector>(shard, span, p);
#pragma unroll
  for (int k = 0; k < Rule::kStates; k++) store_group<kVector>(shard.state[k], span, state[k]);
}

// The block-quantised copy of the updated master: one warp a quantisation block; ranges of the table are in blocks, one block a tile.
struct MasterSource {
  Shard shard;
  int64_t n;

  __device__ __forceinline__ float operator()(int64_t i) const {
    if (shard.master) return shard.master[i];
    return joined(to_float(static_cast<const bf16*>(shard.copy)[i]), shard.remainder[i]);
  }
};

static __global__ void __launch_bounds__(kThreads) quantize_master(MasterSource source, RangeTable table, QuantizedBlocks target) {
  const float* factor = source.shard.grad_factor;
  if (factor && !is_finite(*factor)) return;
  const int64_t tile = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / kWarp;
  const Range& last = table.ranges[table.count - 1];
  if (tile >= last.first_tile + last.stop - last.start) return;  // a whole warp
  const Range& range = table.ranges[range_of(table, tile)];
  quantize_block(target, range.start + tile - range.first_tile, source.n, source);
}

// ---- on the host
static inline bool are_ranges(const fw_range* ranges, int64_t count) {
  for (int64_t i = 0; i < count; i++)
    if (ranges[i].start < (i ? ranges[i - 1].stop : 0) || ranges[i].stop < ranges[i].start) return false;
  return true;
}

// Fill `table` from ranges [first, count) until it is full or a launch could not have more blocks. The next range to do comes back; *tiles
// is the number of tiles in the table.
template <class Tiles>
static inline int64_t fill_table(RangeTable& table, const fw_range* ranges, int64_t first, int64_t count, int64_t* tiles, Tiles tiles_of) {
  table.count = 0;
  *tiles = 0;
  for (; first < count && table.count < kTableRanges; first++) {
    const fw_range& r = ranges[first];
    Range range{*tiles, r.start, r.stop, r.lr, r.weight_decay, r.bias_correction1, r.bias_correction2_sqrt};
    const int64_t more = r.stop > r.start ? tiles_of(first, range) : 0;
    if (more == 0) continue;
    table.ranges[table.count++] = range;
    *tiles += more;
  }
  return first;
}

template <class Rule>
static int run_optimizer(const Shard& shard, const fw_copies* copies, const fw_range* ranges, int64_t count, Rule rule, void* stream) {
  const fw_copies none{};
  const fw_copies& wanted = copies ? *copies : none;
  if (!is_dtype(shard.grad_dtype) || count < 0 || !are_ranges(ranges, count)) return FW_INVALID;
  if (wanted.data && !is_dtype(wanted.dtype)) return FW_INVALID;
  if (!shard.master && !(wanted.data && wanted.dtype == FW_BF16)) return FW_INVALID;
  if (shard.master && shard.remainder) return FW_INVALID;
  if (!shard.master && !shard.remainder && wanted.quantized) return FW_INVALID;
  if (wanted.quantized && !is_quantization(wanted.bits, wanted.block)) return FW_INVALID;
  if (wanted.quantized && !wanted.scales) return FW_INVALID;
  const bool vector = aligned_to_16(shard.master, shard.remainder, shard.state[0], shard.state[1], shard.grad, shard.copy);

  RangeTable table;
  int64_t tiles = 0;
  for (int64_t next = 0; next < count;) {
    next = fill_table(table, ranges, next, count, &tiles, [](int64_t, const Range& range) {
      return divide_up(divide_up(range.stop, kGroup) - range.start / kGroup, kThreads);
    });
    if (!tiles) continue;
    const dim3 grid(static_cast<unsigned>(tiles)), block(kThreads);
    if (vector)
      FW_LAUNCH((update<Rule, true>), grid, block, 0, stream, shard, table, rule);
    else
      FW_LAUNCH((update<Rule, false>), grid, block, 0, stream, shard, table, rule);
  }
  if (wanted.quantized && count > 0) {
    const QuantizedBlocks target{wanted.quantized, wanted.scales, wanted.bits, wanted.block};
    const MasterSource source{shard, ranges[count - 1].stop};
    int64_t first_free = 0;  // a block that two ranges share is written once
    for (int64_t next = 0; next < count;) {
      next = fill_table(table, ranges, next, count, &tiles, [&](int64_t, Range& range) {
        const int64_t first = range.start / wanted.block;
        range.start = first > first_free ? first : first_free;
        range.stop = divide_up(range.stop, wanted.block);
        first_free = range.stop;
        return range.stop - range.start;
      });
      if (!tiles) continue;
      FW_LAUNCH(quantize_master, dim3(static_cast<unsigned>(divide_up(tiles, kWarps))), dim3(kThreads), 0, stream, source, table, target);
    }
  }
  return FW_LAST_ERROR();
}
