// fw_sparse_attention_forward: block-sparse attention, one block of threads per tile of queries, online softmax over the tiles of keys it
// sees.
#include "attention_tiles.h"

namespace {

template <int kHeadDim, bool kVector>
__global__ void __launch_bounds__(kThreads, 2)
    sparse_attention_forward(const void* q, const void* k, const void* v, const int32_t* offsets, const int32_t* columns, void* out,
                             float* log_sum_exp, AttentionShape shape) {
  FW_SHARED(Tile<kHeadDim>, queries, 1);
  FW_SHARED(Tile<kHeadDim>, keys_or_values, 1);
  FW_SHARED(ScoreTile, weights, 1);
  const int64_t head = blockIdx.y, batch = blockIdx.z, kv_head = head / (shape.heads / shape.kv_heads);
  const int64_t first_query = static_cast<int64_t>(blockIdx.x) * kTileRows, query = first_query + tile_row();
  const int64_t query_block = first_query / shape.block;
  const int64_t of_queries = shape.at(shape.heads, batch, head, 0), of_keys = shape.at(shape.kv_heads, batch, kv_head, 0);
  load_tile<kHeadDim, kVector>(queries[0], q, of_queries, first_query, shape);

  float maximum = minus_infinity(), sum = 0.0f, output[kHeadDim / kRowThreads] = {};
  for (int entry = offsets[query_block]; entry < offsets[query_block + 1]; entry++) {
    const int64_t block_start = columns[entry] * shape.block;
    for (int64_t first_key = block_start; first_key < block_start + shape.block; first_key += kTileRows) {
      if (first_key >= shape.tokens || (shape.causal && first_key > first_query + kTileRows - 1)) break;
      __syncthreads();  // the values of the tile before have been used
      load_tile<kHeadDim, kVector>(keys_or_values[0], k, of_keys, first_key, shape);
      __syncthreads();
      float scores[kTileColumns];
      row_products(queries[0], keys_or_values[0], shape.head_dim, scores);
      float larger = maximum;
#pragma unroll
      for (int j = 0; j < kTileColumns; j++) {
        const int64_t key = first_key + tile_column() + kRowThreads * j;
        scores[j] = shape.sees(query, key) ? scores[j] * shape.scale : minus_infinity();
        larger = Max::combine(scores[j], larger);
      }
      larger = row_reduce<Max>(larger);
      const float shrink = larger == minus_infinity() ? 1.0f : expf(maximum - larger);
      float of_tile = 0.0f;
#pragma unroll
      for (int j = 0; j < kTileColumns; j++) {
        scores[j] = scores[j] == minus_infinity() ? 0.0f : expf(scores[j] - larger);
        of_tile += scores[j];
      }
      sum = sum * shrink + row_reduce<Sum>(of_tile);
      maximum = larger;
#pragma unroll
      for (int j = 0; j < kHeadDim / kRowThreads; j++) output[j] *= shrink;
      put_scores(weights[0], scores);
      __syncthreads();
      load_tile<kHeadDim, kVector>(keys_or_values[0], v, of_keys, first_key, shape);
      __syncthreads();
      add_weighted_rows(weights[0], keys_or_values[0], shape.head_dim, output);
    }
  }
  store_row(out, of_queries, query, shape, output, sum > 0.0f || sum != sum ? 1.0f / sum : 0.0f);
  if (tile_column() == 0 && query < shape.tokens) log_sum_exp[(batch * shape.heads + head) * shape.tokens + query] = maximum + logf(sum);
}

}  // namespace

FW_API int fw_sparse_attention_forward(const void* q, const void* k, const void* v, const int32_t* offsets, const int32_t* columns,
                                       void* out, float* log_sum_exp, int64_t batch, int64_t heads, int64_t kv_heads, int64_t tokens,
                                       int64_t head_dim, int64_t block, float scale, int causal, int dtype, void* stream) {
  if (!is_attention_shape(batch, heads, kv_heads, tokens, head_dim, block, dtype)) return FW_INVALID;
  if (batch == 0 || heads == 0 || tokens == 0) return 0;
  const AttentionShape shape{heads, kv_heads, tokens, block, static_cast<int>(head_dim), dtype, scale, causal != 0};
  const dim3 grid(static_cast<unsigned>(divide_up(tokens, kTileRows)), static_cast<unsigned>(heads), static_cast<unsigned>(batch));
  const bool vector = aligned_to_16(q, k, v);
#define FW_FORWARD(width, vector) \
  FW_LAUNCH((sparse_attention_forward<width, vector>), grid, dim3(kThreads), 0, stream, q, k, v, offsets, columns, out, log_sum_exp, shape)
  if (head_dim <= 64) {
    if (vector)
      FW_FORWARD(64, true);
    else
      FW_FORWARD(64, false);
  } else if (vector) {
    FW_FORWARD(128, true);
  } else {
    FW_FORWARD(128, false);
  }
#undef FW_FORWARD
  return FW_LAST_ERROR();
}
