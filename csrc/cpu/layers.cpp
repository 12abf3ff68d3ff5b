/* RMSNorm, rotary embedding, SwiGLU, cross-entropy: checks arguments and splits rows over threads. */
#include <string.h>

#include "framework_kernels.h"
#include "loops.h"
#include "threads.h"

namespace {

constexpr int64_t kLeastElementsPerThread = 8192;

bool known(int dtype) { return dtype == FW_F32 || dtype == FW_BF16 || dtype == FW_F16; }

int64_t bytes_of(int dtype) { return dtype == FW_F32 ? 4 : 2; }

int64_t least_rows(int64_t cols) { return (kLeastElementsPerThread + cols - 1) / (cols > 0 ? cols : 1); }

}  // namespace

extern "C" {

int fw_rms_norm_forward(const void* x, const void* residual, const void* weight, void* y, void* sum, float* rstd, int64_t rows, int64_t cols,
                        float eps, int dtype, void*) {
    if (!known(dtype) || rows < 0 || cols < 0 || (residual == nullptr) != (sum == nullptr)) return FW_INVALID;
    if (cols == 0) return 0;
    const Loops& loops = chosen_loops();
    split(rows, 1, least_rows(cols), Denormals::kFlush, [&](int64_t begin, int64_t end) {
        loops.rms_norm_forward(x, residual, weight, y, sum, rstd, cols, eps, dtype, begin, end);
    });
    return 0;
}

/* Rows are dealt to the n_partial rows of `partial`, and these to threads: the sums are the same for any number of threads. */
int fw_rms_norm_backward(const void* dy, const void* dsum, const void* x_or_sum, const void* weight, const float* rstd, void* dx,
                         float* dweight, float* partial, int64_t n_partial, int64_t rows, int64_t cols, int dtype, void*) {
    if (!known(dtype) || rows < 0 || cols < 0 || n_partial < 1) return FW_INVALID;
    if (cols == 0) return 0;
    const Loops& loops = chosen_loops();
    const int64_t rows_per_partial = (rows + n_partial - 1) / n_partial;
    const int64_t least = rows_per_partial ? (least_rows(cols) + rows_per_partial - 1) / rows_per_partial : n_partial;
    split(n_partial, 1, least, Denormals::kFlush, [&](int64_t begin, int64_t end) {
        for (int64_t group = begin; group < end; ++group) {
            const int64_t start = group * rows_per_partial, stop = start + rows_per_partial < rows ? start + rows_per_partial : rows;
            loops.rms_norm_backward(dy, dsum, x_or_sum, weight, rstd, dx, partial + group * cols, cols, dtype, start, stop);
        }
    });
    split(cols, 64, kLeastElementsPerThread, Denormals::kFlush,
          [&](int64_t begin, int64_t end) { loops.add_rows(partial, n_partial, cols, dweight, begin, end); });
    return 0;
}

int fw_rope(const void* x, const float* cos, const float* sin, void* y, int64_t batch, int64_t tokens, int64_t heads, int64_t head_dim,
            int64_t cos_batch_stride, int inverse, int dtype, void*) {
    if (!known(dtype) || batch < 0 || tokens < 0 || heads < 0 || head_dim < 0 || head_dim % 2 != 0) return FW_INVALID;
    const Loops& loops = chosen_loops();
    const int64_t token_bytes = heads * head_dim * bytes_of(dtype);
    split(batch * tokens, 1, least_rows(heads * head_dim), Denormals::kFlush, [&](int64_t begin, int64_t end) {
        for (int64_t token = begin; token < end; ++token) {
            const int64_t table = token / tokens * cos_batch_stride + token % tokens * (head_dim / 2);
            loops.rope((const char*)x + token * token_bytes, cos + table, sin + table, (char*)y + token * token_bytes, heads, head_dim,
                       inverse ? -1.f : 1.f, dtype);
        }
    });
    return 0;
}

int fw_swiglu_forward(const void* gate, const void* up, void* y, int64_t n, int dtype, void*) {
    if (!known(dtype) || n < 0) return FW_INVALID;
    const Loops& loops = chosen_loops();
    split(n, 64, kLeastElementsPerThread, Denormals::kFlush,
          [&](int64_t begin, int64_t end) { loops.swiglu_forward(gate, up, y, dtype, begin, end); });
    return 0;
}

int fw_swiglu_backward(const void* dy, const void* gate, const void* up, void* dgate, void* dup, int64_t n, int dtype, void*) {
    if (!known(dtype) || n < 0) return FW_INVALID;
    const Loops& loops = chosen_loops();
    split(n, 64, kLeastElementsPerThread, Denormals::kFlush,
          [&](int64_t begin, int64_t end) { loops.swiglu_backward(dy, gate, up, dgate, dup, dtype, begin, end); });
    return 0;
}

int fw_cross_entropy(void* logits, const int64_t* labels, float* loss, int64_t rows, int64_t vocab, int64_t row_stride, float grad_factor,
                     int with_grad, int dtype, void*) {
    if (!known(dtype) || rows < 0 || vocab < 1 || row_stride < vocab) return FW_INVALID;
    const Loops& loops = chosen_loops();
    split(rows, 1, least_rows(vocab), Denormals::kFlush, [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; ++row) {
            char* const at = (char*)logits + row * row_stride * bytes_of(dtype);
            if (labels[row] == -100) {
                loss[row] = 0;
                if (with_grad) memset(at, 0, vocab * bytes_of(dtype));
            } else {
                loss[row] = loops.cross_entropy(at, labels[row], vocab, grad_factor, with_grad != 0, dtype);
            }
        }
    });
    return 0;
}

}  // extern "C"
