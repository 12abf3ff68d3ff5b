// fw_sparse_attention_backward: gradients of queries by tiles of queries, of keys and values by tiles of keys. No atomics: every sum has a
// fixed order.
//
// Tiles of scores are made again from the log-sum-exp of the forward pass. Shared memory holds two tiles of rows at a time; what is needed
// again is loaded again, from the cache.
#include "attention_tiles.h"

namespace {

struct BackwardInputs {
  const void *dout, *q, *k, *v, *out;
  const float *log_sum_exp, *delta;
};

// delta = sum over head_dim of dout * out, per query; one warp a query.
template <bool kVector>
__global__ void __launch_bounds__(kThreads)
    sparse_attention_row_dots(const void* dout, const void* out, float* delta, int64_t rows, int head_dim, int dtype) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / kWarp;
  if (row >= rows) return;  // a whole warp
  float sum = 0.0f;
  for (int group = threadIdx.x % kWarp; group * kGroup < head_dim; group += kWarp) {
    const Span span{row * head_dim + group * kGroup, 0, kGroup};
    float a[kGroup], b[kGroup];
    load_group<kVector>(dout, dtype, span, a);
    load_group<kVector>(out, dtype, span, b);
#pragma unroll
    for (int i = 0; i < kGroup; i++) sum += a[i] * b[i];
  }
  sum = warp_reduce<Sum>(sum);
  if (threadIdx.x % kWarp == 0) delta[row] = sum;
}

// The softmax weight of a scaled score.
static __device__ __forceinline__ float weight_of(float score, float log_sum_exp, bool seen) {
  return seen ? expf(score - log_sum_exp) : 0.0f;
}

template <int kHeadDim, bool kVector>
__global__ void __launch_bounds__(kThreads, 2)
    sparse_attention_of_queries(BackwardInputs in, const int32_t* offsets, const int32_t* columns, void* dq, AttentionShape shape) {
  FW_SHARED(Tile<kHeadDim>, left, 1);
  FW_SHARED(Tile<kHeadDim>, right, 1);
  FW_SHARED(ScoreTile, score_gradients, 1);
  const int64_t head = blockIdx.y, batch = blockIdx.z, kv_head = head / (shape.heads / shape.kv_heads);
  const int64_t first_query = static_cast<int64_t>(blockIdx.x) * kTileRows, query = first_query + tile_row();
  const int64_t query_block = first_query / shape.block;
  const int64_t query_base = shape.at(shape.heads, batch, head, 0), key_base = shape.at(shape.kv_heads, batch, kv_head, 0);
  const int64_t statistic = (batch * shape.heads + head) * shape.tokens + query;
  const float log_sum_exp = query < shape.tokens ? in.log_sum_exp[statistic] : 0.0f;
  const float delta = query < shape.tokens ? in.delta[statistic] : 0.0f;

  float gradient[kHeadDim / kRowThreads] = {};
  for (int entry = offsets[query_block]; entry < offsets[query_block + 1]; entry++) {
    const int64_t block_start = columns[entry] * shape.block;
    for (int64_t first_key = block_start; first_key < block_start + shape.block; first_key += kTileRows) {
      if (first_key >= shape.tokens || (shape.causal && first_key > first_query + kTileRows - 1)) break;
      float weights[kTileColumns], of_weights[kTileColumns];
      __syncthreads();
      load_tile<kHeadDim, kVector>(left[0], in.dout, query_base, first_query, shape);
      load_tile<kHeadDim, kVector>(right[0], in.v, key_base, first_key, shape);
      __syncthreads();
      row_products(left[0], right[0], shape.head_dim, of_weights);
      __syncthreads();
      load_tile<kHeadDim, kVector>(left[0], in.q, query_base, first_query, shape);
      load_tile<kHeadDim, kVector>(right[0], in.k, key_base, first_key, shape);
      __syncthreads();
      row_products(left[0], right[0], shape.head_dim, weights);
#pragma unroll
      for (int j = 0; j < kTileColumns; j++) {
        const int64_t key = first_key + tile_column() + kRowThreads * j;
        const float weight = weight_of(weights[j] * shape.scale, log_sum_exp, shape.sees(query, key));
        of_weights[j] = weight * (of_weights[j] - delta);
      }
      put_scores(score_gradients[0], of_weights);
      __syncwarp();  // a row's scores stay within its warp
      add_weighted_rows(score_gradients[0], right[0], shape.head_dim, gradient);
    }
  }
  store_row(dq, query_base, query, shape, gradient, shape.scale);
}

template <int kHeadDim, bool kVector>
__global__ void __launch_bounds__(kThreads, 2)
    sparse_attention_of_keys(BackwardInputs in, const int32_t* offsets, const int32_t* columns, void* dk, void* dv, AttentionShape shape) {
  FW_SHARED(Tile<kHeadDim>, left, 1);
  FW_SHARED(Tile<kHeadDim>, right, 1);
  FW_SHARED(ScoreTile, score_weights, 1);
  const int64_t kv_head = blockIdx.y, batch = blockIdx.z, queries_per_key = shape.heads / shape.kv_heads;
  const int64_t first_key = static_cast<int64_t>(blockIdx.x) * kTileRows, key = first_key + tile_row();
  const int64_t key_block = first_key / shape.block, key_base = shape.at(shape.kv_heads, batch, kv_head, 0);

  float of_key[kHeadDim / kRowThreads] = {}, of_value[kHeadDim / kRowThreads] = {};
  for (int64_t head = kv_head * queries_per_key; head < (kv_head + 1) * queries_per_key; head++) {
    const int64_t query_base = shape.at(shape.heads, batch, head, 0);
    const int64_t statistics = (batch * shape.heads + head) * shape.tokens;
    for (int entry = offsets[key_block]; entry < offsets[key_block + 1]; entry++) {
      const int64_t block_start = columns[entry] * shape.block;
      for (int64_t first_query = block_start; first_query < block_start + shape.block; first_query += kTileRows) {
        if (first_query >= shape.tokens) break;
        if (shape.causal && first_query + kTileRows - 1 < first_key) continue;
        float weights[kTileColumns], of_weights[kTileColumns];
        __syncthreads();
        load_tile<kHeadDim, kVector>(left[0], in.k, key_base, first_key, shape);
        load_tile<kHeadDim, kVector>(right[0], in.q, query_base, first_query, shape);
        __syncthreads();
        row_products(left[0], right[0], shape.head_dim, weights);
#pragma unroll
        for (int j = 0; j < kTileColumns; j++) {
          const int64_t query = first_query + tile_column() + kRowThreads * j;
          const bool seen = shape.sees(query, key);
          weights[j] = weight_of(weights[j] * shape.scale, seen ? in.log_sum_exp[statistics + query] : 0.0f, seen);
        }
        put_scores(score_weights[0], weights);
        __syncthreads();
        load_tile<kHeadDim, kVector>(left[0], in.v, key_base, first_key, shape);
        load_tile<kHeadDim, kVector>(right[0], in.dout, query_base, first_query, shape);
        __syncthreads();
        row_products(left[0], right[0], shape.head_dim, of_weights);
        add_weighted_rows(score_weights[0], right[0], shape.head_dim, of_value);
#pragma unroll
        for (int j = 0; j < kTileColumns; j++) {
          const int64_t query = first_query + tile_column() + kRowThreads * j;
          of_weights[j] = weights[j] * (of_weights[j] - (query < shape.tokens ? in.delta[statistics + query] : 0.0f));
        }
        __syncthreads();
        put_scores(score_weights[0], of_weights);
        load_tile<kHeadDim, kVector>(right[0], in.q, query_base, first_query, shape);
        __syncthreads();
        add_weighted_rows(score_weights[0], right[0], shape.head_dim, of_key);
      }
    }
  }
  store_row(dk, key_base, key, shape, of_key, shape.scale);
  store_row(dv, key_base, key, shape, of_value, 1.0f);
}

template <int kHeadDim, bool kVector>
void launch_backward(const BackwardInputs& in, const int32_t* offsets, const int32_t* columns, const int32_t* transposed_offsets,
                     const int32_t* transposed_columns, void* dq, void* dk, void* dv, int64_t batch, const AttentionShape& shape,
                     void* stream) {
  const unsigned tiles = static_cast<unsigned>(divide_up(shape.tokens, kTileRows)), batches = static_cast<unsigned>(batch);
  FW_LAUNCH((sparse_attention_of_queries<kHeadDim, kVector>), dim3(tiles, static_cast<unsigned>(shape.heads), batches), dim3(kThreads), 0,
            stream, in, offsets, columns, dq, shape);
  FW_LAUNCH((sparse_attention_of_keys<kHeadDim, kVector>), dim3(tiles, static_cast<unsigned>(shape.kv_heads), batches), dim3(kThreads), 0,
            stream, in, transposed_offsets, transposed_columns, dk, dv, shape);
}

}  // namespace

FW_API int fw_sparse_attention_backward(const void* dout, const void* q, const void* k, const void* v, const void* out,
                                        const float* log_sum_exp, const int32_t* offsets, const int32_t* columns,
                                        const int32_t* transposed_offsets, const int32_t* transposed_columns, void* dq, void* dk, void* dv,
                                        float* delta, int64_t batch, int64_t heads, int64_t kv_heads, int64_t tokens, int64_t head_dim,
                                        int64_t block, float scale, int causal, int dtype, void* stream) {
  if (!is_attention_shape(batch, heads, kv_heads, tokens, head_dim, block, dtype)) return FW_INVALID;
  if (batch == 0 || heads == 0 || tokens == 0) return 0;
  const AttentionShape shape{heads, kv_heads, tokens, block, static_cast<int>(head_dim), dtype, scale, causal != 0};
  const BackwardInputs in{dout, q, k, v, out, log_sum_exp, delta};
  const bool vector = aligned_to_16(dout, q, k, v, out);
  const int64_t rows = batch * heads * tokens;
  const dim3 grid(static_cast<unsigned>(divide_up(rows, kWarps)));
  if (vector)
    FW_LAUNCH(sparse_attention_row_dots<true>, grid, dim3(kThreads), 0, stream, dout, out, delta, rows, shape.head_dim, dtype);
  else
    FW_LAUNCH(sparse_attention_row_dots<false>, grid, dim3(kThreads), 0, stream, dout, out, delta, rows, shape.head_dim, dtype);
  auto* const launch = head_dim <= 64 ? (vector ? launch_backward<64, true> : launch_backward<64, false>)
                                      : (vector ? launch_backward<128, true> : launch_backward<128, false>);
  launch(in, offsets, columns, transposed_offsets, transposed_columns, dq, dk, dv, batch, shape, stream);
  return FW_LAST_ERROR();
}
