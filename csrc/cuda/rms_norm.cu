// fw_rms_norm_forward, fw_rms_norm_backward: y = s * rstd * weight with s = x (+ residual), arXiv:1910.07467.
//
// A row is the work of a team: a warp for short rows (norms of attention heads), a block for long ones. Rows are read twice; the second
// time they lie in the cache. The weight's gradient is summed per block in a fixed order, then over blocks, so that it never depends on
// timing.
#include "groups.h"
#include "reduce.h"

namespace {

constexpr int64_t kWarpRowColumns = 1024;  // longest row that is one warp's work

template <int kTeam>
static __device__ __forceinline__ float team_sum(float value) {
  if constexpr (kTeam == kWarp) return warp_reduce<Sum>(value);
  return block_sum(value);
}

static __device__ __forceinline__ const char* at_row(const void* base, int dtype, int64_t row, int64_t cols) {
  return static_cast<const char*>(base) + row * cols * bytes_of(dtype);
}
static __device__ __forceinline__ char* at_row(void* base, int dtype, int64_t row, int64_t cols) {
  return static_cast<char*>(base) + row * cols * bytes_of(dtype);
}

static __device__ __forceinline__ float rounded(float x, int dtype) {
  if (dtype == FW_F32) return x;
  return dtype == FW_BF16 ? to_float(from_float<bf16>(x)) : to_float(from_float<fp16>(x));
}

template <int kTeam, bool kVector>
__global__ void __launch_bounds__(kThreads) rms_norm_forward(const void* x, const void* residual, const void* weight, void* y, void* sum,
                                                             float* rstd, int64_t rows, int64_t cols, float eps, int dtype) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * (kThreads / kTeam) + threadIdx.x / kTeam;
  if (row >= rows) return;  // a whole team
  const int member = threadIdx.x % kTeam;
  float squares = 0.0f;
  for (int64_t group = member; group * kGroup < cols; group += kTeam) {
    const Span span = span_of(group, 0, cols);
    float v[kGroup], r[kGroup];
    load_group<kVector>(at_row(x, dtype, row, cols), dtype, span, v);
    if (residual) {
      load_group<kVector>(at_row(residual, dtype, row, cols), dtype, span, r);
#pragma unroll
      for (int i = 0; i < kGroup; i++) v[i] = rounded(v[i] + r[i], dtype);
      store_group<kVector>(at_row(sum, dtype, row, cols), dtype, span, v);
    }
#pragma unroll
    for (int i = 0; i < kGroup; i++) squares += v[i] * v[i];
  }
  const float factor = 1.0f / sqrtf(team_sum<kTeam>(squares) / static_cast<float>(cols) + eps);
  if (member == 0) rstd[row] = factor;
  const void* normed = residual ? sum : x;
  for (int64_t group = member; group * kGroup < cols; group += kTeam) {  // the groups that this thread wrote itself
    const Span span = span_of(group, 0, cols);
    float v[kGroup], w[kGroup];
    load_group<kVector>(at_row(normed, dtype, row, cols), dtype, span, v);
    load_group<kVector>(weight, dtype, span, w);
#pragma unroll
    for (int i = 0; i < kGroup; i++) v[i] = v[i] * factor * w[i];
    store_group<kVector>(at_row(y, dtype, row, cols), dtype, span, v);
  }
}

// The weight's gradient of one thread's columns over the rows of its team: in shared memory if it fits, else in `partial` itself.
template <int kTeam, bool kShared, bool kVector>
__global__ void __launch_bounds__(kThreads, 3)
    rms_norm_backward(const void* dy, const void* dsum, const void* normed, const void* weight, const float* rstd, void* dx, float* partial,
                      int64_t rows, int64_t cols, int dtype) {
  constexpr int kTeams = kThreads / kTeam;
  FW_DYNAMIC_SHARED(float, shared);
  const int team = threadIdx.x / kTeam, member = threadIdx.x % kTeam;
  float* of_block = partial + static_cast<int64_t>(blockIdx.x) * cols;
  float* mine = kShared ? shared + team * cols : of_block;
  for (int64_t group = member; group * kGroup < cols; group += kTeam) {
    const Span span = span_of(group, 0, cols);
    for (int i = 0; i < span.end; i++) mine[span.first + i] = 0.0f;  // owned by this thread to the end of the loop over rows
  }
  for (int64_t row = static_cast<int64_t>(blockIdx.x) * kTeams + team; row < rows; row += static_cast<int64_t>(gridDim.x) * kTeams) {
    const float factor = rstd[row];
    float dot = 0.0f;
    for (int64_t group = member; group * kGroup < cols; group += kTeam) {
      const Span span = span_of(group, 0, cols);
      float d[kGroup], v[kGroup], w[kGroup];
      load_group<kVector>(at_row(dy, dtype, row, cols), dtype, span, d);
      load_group<kVector>(at_row(normed, dtype, row, cols), dtype, span, v);
      load_group<kVector>(weight, dtype, span, w);
#pragma unroll
      for (int i = 0; i < kGroup; i++) dot += d[i] * w[i] * v[i];
    }
    const float along = team_sum<kTeam>(dot) * factor * factor * factor / static_cast<float>(cols);
    for (int64_t group = member; group * kGroup < cols; group += kTeam) {
      const Span span = span_of(group, 0, cols);
      float d[kGroup], v[kGroup], w[kGroup];
      load_group<kVector>(at_row(dy, dtype, row, cols), dtype, span, d);
      load_group<kVector>(at_row(normed, dtype, row, cols), dtype, span, v);
      load_group<kVector>(weight, dtype, span, w);
#pragma unroll
      for (int i = 0; i < kGroup; i++) {
        if (span.wants(i)) mine[span.first + i] += d[i] * v[i] * factor;
        v[i] = d[i] * w[i] * factor - v[i] * along;
      }
      if (dsum) {
        load_group<kVector>(at_row(dsum, dtype, row, cols), dtype, span, d);
#pragma unroll
        for (int i = 0; i < kGroup; i++) v[i] += d[i];
      }
      store_group<kVector>(at_row(dx, dtype, row, cols), dtype, span, v);
    }
  }
  if constexpr (kShared) {
    __syncthreads();
    for (int64_t column = threadIdx.x; column < cols; column += kThreads) {
      float sum = 0.0f;
      for (int t = 0; t < kTeams; t++) sum += shared[t * cols + column];
      of_block[column] = sum;
    }
  }
}

// One block adds 32 columns; each of its warps a share of the rows.
__global__ void __launch_bounds__(kThreads)
    rms_norm_add_partial_rows(const float* partial, int64_t n_partial, int64_t cols, float* dweight) {
  FW_SHARED(float, of_warp, kThreads);
  const int64_t column = static_cast<int64_t>(blockIdx.x) * kWarp + threadIdx.x % kWarp;
  float sum = 0.0f;
  if (column < cols)
    for (int64_t row = threadIdx.x / kWarp; row < n_partial; row += kWarps) sum += partial[row * cols + column];
  of_warp[threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.x >= kWarp || column >= cols) return;
  sum = 0.0f;
  for (int warp = 0; warp < kWarps; warp++) sum += of_warp[warp * kWarp + threadIdx.x];
  dweight[column] = sum;
}

bool rows_are_aligned(int64_t cols, int dtype) { return cols * bytes_of(dtype) % 16 == 0; }

}  // namespace

FW_API int fw_rms_norm_forward(const void* x, const void* residual, const void* weight, void* y, void* sum, float* rstd, int64_t rows,
                               int64_t cols, float eps, int dtype, void* stream) {
  if (!is_dtype(dtype) || rows < 0 || cols < 0 || !residual != !sum) return FW_INVALID;
  if (rows == 0 || cols == 0) return 0;
  const bool vector = rows_are_aligned(cols, dtype) && aligned_to_16(x, residual, weight, y, sum);
  const dim3 block(kThreads);
  if (cols <= kWarpRowColumns) {
    const dim3 grid(static_cast<unsigned>(divide_up(rows, kWarps)));
    if (vector)
      FW_LAUNCH((rms_norm_forward<kWarp, true>), grid, block, 0, stream, x, residual, weight, y, sum, rstd, rows, cols, eps, dtype);
    else
      FW_LAUNCH((rms_norm_forward<kWarp, false>), grid, block, 0, stream, x, residual, weight, y, sum, rstd, rows, cols, eps, dtype);
  } else {
    const dim3 grid(static_cast<unsigned>(rows));
    if (vector)
      FW_LAUNCH((rms_norm_forward<kThreads, true>), grid, block, 0, stream, x, residual, weight, y, sum, rstd, rows, cols, eps, dtype);
    else
      FW_LAUNCH((rms_norm_forward<kThreads, false>), grid, block, 0, stream, x, residual, weight, y, sum, rstd, rows, cols, eps, dtype);
  }
  return FW_LAST_ERROR();
}

FW_API int fw_rms_norm_backward(const void* dy, const void* dsum, const void* x_or_sum, const void* weight, const float* rstd, void* dx,
                                float* dweight, float* partial, int64_t n_partial, int64_t rows, int64_t cols, int dtype, void* stream) {
  if (!is_dtype(dtype) || rows < 0 || cols < 0 || n_partial < 1) return FW_INVALID;
  if (cols == 0) return 0;
  const bool vector = rows_are_aligned(cols, dtype) && aligned_to_16(dy, dsum, x_or_sum, weight, dx);
  const dim3 grid(static_cast<unsigned>(n_partial)), block(kThreads);
  constexpr int64_t kMostShared = 40 * 1024;
#define FW_RMS_NORM_BACKWARD(team, shared, vector, bytes)                                                                               \
  FW_LAUNCH((rms_norm_backward<team, shared, vector>), grid, block, bytes, stream, dy, dsum, x_or_sum, weight, rstd, dx, partial, rows, \
            cols, dtype)
  if (cols <= kWarpRowColumns) {
    const size_t bytes = static_cast<size_t>(cols) * kWarps * sizeof(float);
    if (vector)
      FW_RMS_NORM_BACKWARD(kWarp, true, true, bytes);
    else
      FW_RMS_NORM_BACKWARD(kWarp, true, false, bytes);
  } else if (cols * static_cast<int64_t>(sizeof(float)) <= kMostShared) {
    const size_t bytes = static_cast<size_t>(cols) * sizeof(float);
    if (vector)
      FW_RMS_NORM_BACKWARD(kThreads, true, true, bytes);
    else
      FW_RMS_NORM_BACKWARD(kThreads, true, false, bytes);
  } else if (vector) {
    FW_RMS_NORM_BACKWARD(kThreads, false, true, 0);
  } else {
    FW_RMS_NORM_BACKWARD(kThreads, false, false, 0);
  }
#undef FW_RMS_NORM_BACKWARD
  FW_LAUNCH(rms_norm_add_partial_rows, dim3(static_cast<unsigned>(divide_up(cols, kWarp))), block, 0, stream, partial, n_partial, cols,
            dweight);
  return FW_LAST_ERROR();
}
