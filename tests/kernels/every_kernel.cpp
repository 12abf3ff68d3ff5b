// Calls every function of the CUDA library once or twice on small tensors of exactly the size it may touch, for runs under the sanitizers.
//
// Values are looked at by the Python tests; here only what a sanitizer sees counts. Tensors are separate allocations, so that one element
// too far is another's red zone; `Tensor(n, 1)` starts off a multiple of 16 bytes and takes the kernels down their scalar path.
#include <cstdio>
#include <cstdlib>
#include <initializer_list>

#include "../../csrc/emulator/runtime.h"
#include "../../csrc/include/framework_kernels.h"

namespace {

// The thread sanitizer's build has blocks of 64 threads and wants few of them.
#if defined(FW_BLOCK_THREADS)
constexpr bool kFewBlocks = true;
#else
constexpr bool kFewBlocks = false;
#endif

template <class T>
struct Tensor {
  T* memory;
  int offset;

  explicit Tensor(int64_t n, int offset = 0, T value = T(1)) : offset(offset) {
    memory = static_cast<T*>(malloc((n + offset) * sizeof(T)));  // at a multiple of 16 bytes
    for (int64_t i = 0; i < n + offset; i++) memory[i] = value;
  }
  ~Tensor() { free(memory); }
  Tensor(const Tensor&) = delete;
  T* get() const { return memory + offset; }
  operator T*() const { return get(); }
};

constexpr uint16_t kOne[3] = {0, 0x3f80, 0x3c00};  // 1.0 in bf16 and fp16

// A tensor of ones in any dtype.
struct Any {
  Tensor<float> wide;
  Tensor<uint16_t> narrow;
  bool is_wide;

  Any(int dtype, int64_t n, int offset = 0)
      : wide(dtype == FW_F32 ? n : 0, dtype == FW_F32 ? offset : 0),
        narrow(dtype == FW_F32 ? 0 : n, dtype == FW_F32 ? 0 : offset, kOne[dtype]),
        is_wide(dtype == FW_F32) {}
  operator void*() const { return is_wide ? static_cast<void*>(wide.get()) : static_cast<void*>(narrow.get()); }
};

int failures = 0;

void expect_zero(const char* name, int code) {
  if (code == 0) return;
  failures++;
  printf("%s returned %d: %s\n", name, code, fw_emulator_report());
}
#define RUN(call) expect_zero(#call, call)

void optimizers(int dtype, int offset) {
  const int64_t n = kFewBlocks ? 600 : 1100;
  const fw_range ranges[3] = {{3, 40, 0.1f, 0.1f, 0.1f, 0.3f}, {41, 41, 0.1f, 0, 1, 1}, {64, n, 0.2f, 0, 0.1f, 0.3f}};
  Tensor<float> master(n, offset), m(n, offset), v(n, offset), factor(1), scales(5);
  Tensor<uint16_t> copy(n, offset, 0x3f80), remainder(n, offset, 0);
  Tensor<int8_t> q(n, 0, 0);
  Any grad(dtype, n, offset);
  const fw_copies copies{copy.get(), FW_BF16, q.get(), scales.get(), offset ? 4 : 8, 256};
  RUN(fw_adamw(master, nullptr, m, v, grad, dtype, &copies, ranges, 3, 0.9, 0.99, 1e-8, factor, nullptr));
  RUN(fw_adamw(nullptr, remainder, m, v, grad, dtype, &copies, ranges, 3, 0.9, 0.99, 1e-8, factor, nullptr));
  RUN(fw_lion(nullptr, remainder, m, grad, dtype, &copies, ranges, 3, 0.9, 0.99, factor, nullptr));
  RUN(fw_sgd(master, nullptr, m, grad, dtype, nullptr, ranges, 3, 0.9, 0.1, 1, 0, nullptr, nullptr));
  RUN(fw_sgd(master, nullptr, nullptr, grad, dtype, nullptr, ranges, 3, 0, 0, 0, 1, nullptr, nullptr));
}

void flat(int dtype, int offset) {
  const int64_t n = kFewBlocks ? 603 : 1003, block = 256, blocks = 4;
  Any x(dtype, n, offset), y(dtype, n, offset);
  Tensor<float> error(n, offset), scales(blocks), part_scales(3 * blocks);
  Tensor<uint8_t> q(n, offset), parts(3 * n, offset);
  Tensor<double> sum(1), scratch(FW_SQUARE_SUM_SCRATCH);
  RUN(fw_square_sum(x, dtype, n, sum, scratch, FW_SQUARE_SUM_SCRATCH, nullptr));
  RUN(fw_cast(x, dtype, y, dtype, n, nullptr));
  for (int bits : {8, 4}) {
    RUN(fw_quantize(x, dtype, n, bits, block, q, scales, error, nullptr));
    RUN(fw_dequantize(q, bits, scales, n, block, y, dtype, 1, nullptr));
    RUN(fw_dequantize_sum_quantize(parts, part_scales, 3, n, bits, block, q, scales, y, dtype, nullptr));
  }
  RUN(fw_nf4_dequantize(q, scales, n, block, y, dtype, nullptr));
}

void norms(int dtype, int offset, int64_t rows, int64_t cols, int64_t n_partial) {
  Any x(dtype, rows * cols, offset), r(dtype, rows * cols, offset), y(dtype, rows * cols, offset), s(dtype, rows * cols, offset);
  Any weight(dtype, cols, offset);
  Tensor<float> rstd(rows), dweight(cols), partial(n_partial * cols);
  RUN(fw_rms_norm_forward(x, r, weight, y, s, rstd, rows, cols, 1e-5f, dtype, nullptr));
  RUN(fw_rms_norm_backward(y, r, s, weight, rstd, x, dweight, partial, n_partial, rows, cols, dtype, nullptr));
}

void layers(int dtype, int offset) {
  const int64_t batch = 1, tokens = 5, heads = 3, width = 32, n = batch * tokens * heads * width;
  Any x(dtype, n, offset), y(dtype, n, offset), z(dtype, n, offset);
  Tensor<float> cos(tokens * width / 2), sin(tokens * width / 2), loss(3);
  RUN(fw_rope(x, cos, sin, y, batch, tokens, heads, width, 0, 0, dtype, nullptr));
  RUN(fw_swiglu_forward(x, y, z, n, dtype, nullptr));
  RUN(fw_swiglu_backward(z, x, y, x, y, n, dtype, nullptr));
  const int64_t vocab = 130 + offset, labels[3] = {1, -100, vocab - 1};
  Any logits(dtype, 3 * vocab);
  RUN(fw_cross_entropy(logits, labels, loss, 3, vocab, vocab, 1.0f, 1, dtype, nullptr));
}

void rows(int dtype) {
  const int64_t tokens = 150, cols = 70, vocab = 5;
  Any dy(dtype, tokens * cols), dweight(dtype, vocab * cols), y(dtype, 3 * cols);
  Tensor<int64_t> ids(tokens), order(tokens);
  Tensor<float> partial(3 * 2 * cols);
  for (int64_t i = 0; i < tokens; i++) ids[i] = i < 10 ? 0 : i < 140 ? 2 : 4, order[i] = i;
  RUN(fw_embedding_backward(dy, ids, order, dweight, partial, tokens, cols, vocab, -1, dtype, nullptr));
  RUN(fw_top_k(dy, y, 3, cols, 20, dtype, nullptr));
}

void attention(int dtype, int offset, int64_t width) {
  const int64_t batch = 1, heads = 2, kv_heads = 1, tokens = kFewBlocks ? 20 : 40, block = kFewBlocks ? 16 : 32;
  Any q(dtype, heads * tokens * width, offset), out(dtype, heads * tokens * width, offset), dq(dtype, heads * tokens * width, offset);
  Any k(dtype, tokens * width, offset), v(dtype, tokens * width, offset), dk(dtype, tokens * width), dv(dtype, tokens * width);
  Tensor<float> log_sum_exp(heads * tokens), delta(heads * tokens);
  const int32_t offsets[] = {0, 1, 3}, columns[] = {0, 0, 1}, transposed_offsets[] = {0, 2, 3}, transposed_columns[] = {0, 1, 1};
  RUN(fw_sparse_attention_forward(q, k, v, offsets, columns, out, log_sum_exp, batch, heads, kv_heads, tokens, width, block, 0.1f, 1, dtype,
                                  nullptr));
  RUN(fw_sparse_attention_backward(q, q, k, v, out, log_sum_exp, offsets, columns, transposed_offsets, transposed_columns, dq, dk, dv,
                                   delta, batch, heads, kv_heads, tokens, width, block, 0.1f, 1, dtype, nullptr));
}

}  // namespace

extern "C" int run_planted_fault(const char* name);  // planted_faults.cu

int main(int count, char** arguments) {
  if (count > 1) {
    const int found = run_planted_fault(arguments[1]);
    if (found == 1) printf("wrong values\n");
    return found != 0;
  }
  for (int offset : {0, 1}) {
    if (kFewBlocks && offset) break;  // the scalar paths meet at the same barriers
    const int dtype = offset ? FW_F32 : FW_BF16;
    optimizers(dtype, offset);
    flat(dtype, offset);
    norms(dtype, offset, 5, 72, 2);
    norms(dtype, offset, 2, 1100, 1);
    layers(dtype, offset);
    attention(dtype, offset, offset ? 72 : 16);
  }
  if (!kFewBlocks) norms(FW_F16, 0, 1, 10600, 1);  // 332 blocks
  if (!kFewBlocks) flat(FW_F16, 0);
  rows(FW_F16);
  printf("%d failures\n", failures);
  return failures ? 1 : 0;
}
