// Tiles of block-sparse attention: kTileRows rows of queries, keys or values in shared memory as floats, and products of two of them.
//
// Eight threads share a row: thread c of them has columns c, c + 8, ... of every product, so that neighbours read neighbouring banks and a
// row's sums are shuffles within eight lanes. Plain fp32 arithmetic: right on every device, and no tensor cores.
#pragma once
#include "groups.h"
#include "reduce.h"

constexpr int kRowThreads = 8;
constexpr int kTileRows = kThreads / kRowThreads;
constexpr int kTileColumns = kTileRows / kRowThreads;  // of a score tile [kTileRows, kTileRows] per thread

// What a launch knows of the sizes; see framework_kernels.h.
struct AttentionShape {
  int64_t heads, kv_heads, tokens, block;
  int head_dim, dtype;
  float scale;
  bool causal;

  // Elements before row `token` of a head.
  __device__ __forceinline__ int64_t at(int64_t head_count, int64_t batch, int64_t head, int64_t token) const {
    return ((batch * head_count + head) * tokens + token) * head_dim;
  }
  __device__ __forceinline__ bool sees(int64_t query, int64_t key) const {
    return query < tokens && key < tokens && (!causal || key <= query);
  }
};

// [kTileRows, kHeadDim] with a column more, so that rows start in different banks. Columns from head_dim on are never read.
template <int kHeadDim>
struct Tile {
  float rows[kTileRows][kHeadDim + 1];
};
struct ScoreTile {
  float rows[kTileRows][kTileRows + 1];
};

static __device__ __forceinline__ int tile_row() { return threadIdx.x / kRowThreads; }
static __device__ __forceinline__ int tile_column() { return threadIdx.x % kRowThreads; }

// All threads. Rows from `tokens` on are 0. `base` is at row 0 of a head.
template <int kHeadDim, bool kVector>
static __device__ void load_tile(Tile<kHeadDim>& tile, const void* base, int64_t base_element, int64_t first, const AttentionShape& shape) {
  const char* head = static_cast<const char*>(base) + base_element * bytes_of(shape.dtype);
  const int groups = shape.head_dim / kGroup;
  for (int item = threadIdx.x; item < kTileRows * groups; item += kThreads) {
    const int row = item / groups, column = item % groups * kGroup;
    float x[kGroup] = {};
    if (first + row < shape.tokens) load_group<kVector>(head, shape.dtype, Span{(first + row) * shape.head_dim + column, 0, kGroup}, x);
#pragma unroll
    for (int i = 0; i < kGroup; i++) tile.rows[row][column + i] = x[i];
  }
}

// products[j] = row tile_row() of `a` times row tile_column() + 8 j of `b`.
template <int kHeadDim>
static __device__ __forceinline__ void row_products(const Tile<kHeadDim>& a, const Tile<kHeadDim>& b, int head_dim,
                                                    float (&products)[kTileColumns]) {
  const int row = tile_row(), column = tile_column();
#pragma unroll
  for (int j = 0; j < kTileColumns; j++) products[j] = 0.0f;
#pragma unroll 8
  for (int d = 0; d < head_dim; d++) {
    const float x = a.rows[row][d];
#pragma unroll
    for (int j = 0; j < kTileColumns; j++) products[j] += x * b.rows[column + kRowThreads * j][d];
  }
}

// sum[j] += row tile_row() of `scores` times column tile_column() + 8 j of `b`.
template <int kHeadDim>
static __device__ __forceinline__ void add_weighted_rows(const ScoreTile& scores, const Tile<kHeadDim>& b, int head_dim,
                                                         float (&sum)[kHeadDim / kRowThreads]) {
  const int row = tile_row(), column = tile_column();
  for (int key = 0; key < kTileRows; key++) {
    const float weight = scores.rows[row][key];
#pragma unroll
    for (int j = 0; j < kHeadDim / kRowThreads; j++)
      if (kRowThreads * j < head_dim) sum[j] += weight * b.rows[key][column + kRowThreads * j];
  }
}

static __device__ __forceinline__ void put_scores(ScoreTile& tile, const float (&scores)[kTileColumns]) {
#pragma unroll
  for (int j = 0; j < kTileColumns; j++) tile.rows[tile_row()][tile_column() + kRowThreads * j] = scores[j];
}

template <class Op>
static __device__ __forceinline__ float row_reduce(float value) {
#pragma unroll
  for (int distance = kRowThreads / 2; distance; distance /= 2) value = Op::combine(value, __shfl_xor_sync(kAllLanes, value, distance));
  return value;
}

// Row `token` of a head, of which this thread has columns tile_column() + 8 j, times `factor`.
template <int kColumns>
static __device__ __forceinline__ void store_row(void* base, int64_t base_element, int64_t token, const AttentionShape& shape,
                                                 const float (&x)[kColumns], float factor) {
  if (token >= shape.tokens) return;
  const int64_t at = base_element + token * shape.head_dim + tile_column();
#pragma unroll
  for (int j = 0; j < kColumns; j++) {
    if (kRowThreads * j >= shape.head_dim) break;
    store_element(base, shape.dtype, at + kRowThreads * j, x[j] * factor);
  }
}

// ---- on the host
static inline bool is_attention_shape(int64_t batch, int64_t heads, int64_t kv_heads, int64_t tokens, int64_t head_dim, int64_t block,
                                      int dtype) {
  return is_dtype(dtype) && batch >= 0 && batch <= 65535 && heads >= 0 && heads <= 65535 && kv_heads > 0 && heads % kv_heads == 0 &&
         tokens >= 0 && head_dim > 0 && head_dim <= 128 && head_dim % 8 == 0 && block > 0 && block % kTileRows == 0;
}
