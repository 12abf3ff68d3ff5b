// fw_embedding_backward: the gradient of an embedding's rows, summed in the order of the tokens: no atomics, the same bits in every run.
//
// The caller sorts the tokens by id (stably). Blocks take chunks of the sorted list and sum runs of equal ids. A run inside one chunk is
// written at once; of a run that crosses chunks each chunk keeps its part in `partial`, and a second launch adds those, so that a token
// which is in every sentence does not keep one block busy while all others are done.
#include "groups.h"

namespace {

constexpr int64_t kChunk = FW_EMBEDDING_CHUNK;

struct Runs {
  const int64_t* ids;    // sorted
  const int64_t* order;  // where each was in the batch
  int64_t tokens, vocab, padding_index;

  __device__ __forceinline__ bool counts(int64_t id) const { return id >= 0 && id < vocab && id != padding_index; }
};

// blockIdx.x: chunk, blockIdx.y: kThreads columns. partial: [chunks, 2, cols]; 0 for the run that came in, 1 for the one that goes on.
__global__ void __launch_bounds__(kThreads, 4)
    embedding_sum_chunks(Runs runs, const void* dy, void* dweight, float* partial, int64_t cols, int dtype) {
  const int64_t column = static_cast<int64_t>(blockIdx.y) * kThreads + threadIdx.x;
  if (column >= cols) return;
  const int64_t start = static_cast<int64_t>(blockIdx.x) * kChunk;
  const int64_t stop = start + kChunk < runs.tokens ? start + kChunk : runs.tokens;
  float* incoming = partial + static_cast<int64_t>(blockIdx.x) * 2 * cols + column;
  bool came_in = start > 0 && runs.ids[start - 1] == runs.ids[start];
  float sum = 0.0f;
  for (int64_t i = start; i < stop; i++) {
    const int64_t id = runs.ids[i];
    if (runs.counts(id)) sum += load_element(dy, dtype, runs.order[i] * cols + column);
    const bool run_ends = i + 1 == runs.tokens || runs.ids[i + 1] != id;
    if (!run_ends && i + 1 < stop) continue;
    if (came_in)
      incoming[0] = sum;  // also of a run that fills the chunk and goes on
    else if (!run_ends)
      incoming[cols] = sum;
    else if (runs.counts(id))
      store_element(dweight, dtype, id * cols + column, sum);
    came_in = false;
    sum = 0.0f;
  }
}

// The block of the chunk in which a run starts that goes on adds up its parts.
__global__ void __launch_bounds__(kThreads) embedding_join_chunks(Runs runs, void* dweight, const float* partial, int64_t cols, int dtype) {
  const int64_t column = static_cast<int64_t>(blockIdx.y) * kThreads + threadIdx.x;
  const int64_t start = static_cast<int64_t>(blockIdx.x) * kChunk, stop = start + kChunk;
  if (column >= cols || stop >= runs.tokens) return;
  const int64_t id = runs.ids[stop - 1];
  const bool started_before = start > 0 && runs.ids[start - 1] == id;
  if (runs.ids[stop] != id || started_before || !runs.counts(id)) return;
  float sum = partial[(static_cast<int64_t>(blockIdx.x) * 2 + 1) * cols + column];
  for (int64_t next = stop; next < runs.tokens && runs.ids[next] == id; next += kChunk) sum += partial[next / kChunk * 2 * cols + column];
  store_element(dweight, dtype, id * cols + column, sum);
}

}  // namespace

FW_API int fw_embedding_backward(const void* dy, const int64_t* sorted_ids, const int64_t* order, void* dweight, float* partial,
                                 int64_t tokens, int64_t cols, int64_t vocab, int64_t padding_index, int dtype, void* stream) {
  if (!is_dtype(dtype) || tokens < 0 || cols < 0 || vocab < 0) return FW_INVALID;
  if (tokens == 0 || cols == 0) return 0;
  const Runs runs{sorted_ids, order, tokens, vocab, padding_index};
  const dim3 grid(static_cast<unsigned>(divide_up(tokens, kChunk)), static_cast<unsigned>(divide_up(cols, kThreads))), block(kThreads);
  FW_LAUNCH(embedding_sum_chunks, grid, block, 0, stream, runs, dy, dweight, partial, cols, dtype);
  FW_LAUNCH(embedding_join_chunks, grid, block, 0, stream, runs, dweight, partial, cols, dtype);
  return FW_LAST_ERROR();
}
