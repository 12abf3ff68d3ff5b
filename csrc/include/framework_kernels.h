/* The ABI of the compiled kernels: every function of libframework_cpu and libframework_cuda, declared once.
 *
 * Both libraries export functions of the same names and signatures; a library may lack a function, and the caller then uses its plain-torch
 * reference. Plain C, no torch and no CPython, so that one build serves every version of either. The same rules hold for all functions:
 *
 *   - The last argument is a CUDA stream (cudaStream_t as void*); the CPU library ignores it.
 *   - The result is 0, FW_INVALID for arguments that the function refuses, or a cudaError_t. A refused call has written nothing.
 *   - Pointers are memory of the library's device, except what is marked "host memory". Tensors are contiguous. Starts need the alignment of
 *     their element only. Inputs and outputs do not overlap, unless it says that they may.
 *   - Sizes and offsets are elements in int64_t. A size of 0 is a valid call that does nothing, whatever the pointers
 *     (fw_square_sum still writes its 0).
 *   - Nothing allocates, keeps a pointer, or waits for the device.
 *   - Arithmetic is fp32 whatever the dtype of the tensors, unless it says otherwise. Rounding to bf16 and fp16 is to nearest even. The
 *     functions with sums of many elements or exponentials state their error.
 *   - fp32 denormals (below 1.18e-38) may count as zero in all functions but fw_cast and fw_square_sum, and do on a CPU: moments that decay
 *     into denormals make a CPU 10 to 25 times slower otherwise.
 */
#ifndef FRAMEWORK_KERNELS_H
#define FRAMEWORK_KERNELS_H

#include <stdint.h>

#if defined(_WIN32)
#define FW_API __declspec(dllexport)
#else
#define FW_API __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* Goes up with every change that a caller could notice. framework/kernels/library.py refuses a library of another version. */
#define FW_ABI_VERSION 1

/* Arguments that a function refuses. Above every cudaError_t. */
#define FW_INVALID 10001

enum fw_dtype { FW_F32 = 0, FW_BF16 = 1, FW_F16 = 2 };

/* ---- the library itself ---- */

FW_API int fw_abi_version(void);

/* What was built and what is used, for people: "cpu: avx2, built with gcc 12.2" or "cuda: sm_80 sm_90 sm_100 ptx". Static memory. */
FW_API const char* fw_describe(void);

/* SHA-256 of the sources that the library was built from (csrc/sources.cmake). Static memory. */
FW_API const char* fw_sources(void);

/* CPU only. "baseline", "avx2", "avx512", or "auto" for the best that this processor has. FW_INVALID: not built, or the processor lacks it. */
FW_API int fw_choose_isa(const char* name);

/* CPU only. Threads of every later call in this process; 0: OpenMP's default. */
FW_API int fw_set_threads(int threads);

/* ---- optimizers on a flat shard of parameters, gradients and state ----
 *
 * A call updates the elements of all ranges; each range has settings of its own, so that parameters with and without weight decay, or with
 * different learning rates, need one call together. Ranges are ascending and do not overlap; elements between them are not touched.
 *
 * grad_factor: one float that every gradient is multiplied by first (1 / loss scale, clipping, 1 / token count: one product). NULL: 1.
 * If it is not finite, NOTHING is written: this is how a step is skipped without the host knowing.
 *
 * master: fp32 parameters, read and written. Or, to save 2 bytes per parameter, master is NULL and remainder (uint16_t) is given: the fp32
 * bits of a parameter are then  (copies->data << 16) + (int16_t)remainder,  where copies->data is the bf16 compute copy (copies->dtype must
 * be FW_BF16). The split loses nothing. Or both are NULL: the bf16 copy is all there is of a parameter, and what it is rounded by is lost
 * (copies->quantized must be NULL then).
 * A bf16 copy is in every case the updated fp32 value rounded to nearest with ties away from zero: ties to even would leave a remainder of
 * +32768, which does not fit. (Copies in fp16 round ties to even.)
 *
 * Betas, eps, momentum and dampening are doubles because 1 - beta is wanted: in float, 1 - 0.999f is off by 1.3e-5.
 */
typedef struct {
    int64_t start, stop;         /* elements [start, stop) of the shard */
    float lr, weight_decay;
    float bias_correction1;      /* 1 - beta1^step            (Adam only) */
    float bias_correction2_sqrt; /* sqrt(1 - beta2^step)      (Adam only) */
} fw_range;

/* What an optimizer writes besides the master. NULL members are not wanted; a NULL fw_copies wants nothing.
 *
 * data: [shard] in dtype, the elements of the ranges.
 * quantized, scales: the block-quantised copy, format as fw_quantize. Blocks count from the shard's element 0. Every block that holds an
 * element of a range is written whole, from the master as it is after the update; elements from the last range's stop on count as zero. */
typedef struct {
    void* data;
    int dtype;
    void* quantized;
    float* scales;
    int bits;  /* 8 or 4 */
    int block; /* elements per scale */
} fw_copies;

/* torch.optim.AdamW(fused=True), Loshchilov and Hutter, arXiv:1711.05101, with g = grad * *grad_factor:
 *   p -= lr weight_decay p;  m += (1 - beta1)(g - m);  v = beta2 v + (1 - beta2) g g;
 *   p -= lr / bias_correction1 * m / (sqrt(v) / bias_correction2_sqrt + eps)
 * copies, ranges: host memory (the pointers within copies are the device's). */
FW_API int fw_adamw(float* master, uint16_t* remainder, float* exp_avg, float* exp_avg_sq, const void* grad, int grad_dtype,
                    const fw_copies* copies, const fw_range* ranges, int64_t n_ranges, double beta1, double beta2, double eps,
                    const float* grad_factor, void* stream);

/* Lion, Chen et al., arXiv:2302.06675:  p -= lr weight_decay p;  p -= lr sign(beta1 m + (1 - beta1) g);  m = beta2 m + (1 - beta2) g */
FW_API int fw_lion(float* master, uint16_t* remainder, float* exp_avg, const void* grad, int grad_dtype, const fw_copies* copies,
                   const fw_range* ranges, int64_t n_ranges, double beta1, double beta2, const float* grad_factor, void* stream);

/* torch.optim.SGD, weight decay added to the gradient:
 *   g += weight_decay p;  b = first_step ? g : momentum b + (1 - dampening) g;  g = nesterov ? g + momentum b : b;  p -= lr g
 * momentum_buffer NULL (momentum must be 0): the line about b is left out. */
FW_API int fw_sgd(float* master, uint16_t* remainder, float* momentum_buffer, const void* grad, int grad_dtype, const fw_copies* copies,
                  const fw_range* ranges, int64_t n_ranges, double momentum, double dampening, int nesterov, int first_step,
                  const float* grad_factor, void* stream);

/* ---- flat tensors ---- */

/* Doubles of scratch that fw_square_sum may want at most. */
#define FW_SQUARE_SUM_SCRATCH 2048

/* *out = sum of x[i]^2, squared and added in fp64: within 1e-12 of the exact sum, no overflow for any finite x. The same x gives the same
 * bits, whatever the number of threads. A NaN or an infinity in x makes it NaN or infinite: this is also the check for non-finite gradients.
 * scratch: [scratch_numel] doubles, >= FW_SQUARE_SUM_SCRATCH; the CPU library takes NULL, too. */
FW_API int fw_square_sum(const void* x, int dtype, int64_t n, double* out, double* scratch, int64_t scratch_numel, void* stream);

/* dst[i] = src[i], rounded to nearest even. NaN stays NaN (in bf16 always 0x7fc0), too large for fp16 becomes infinite, denormals are kept. */
FW_API int fw_cast(const void* src, int src_dtype, void* dst, int dst_dtype, int64_t n, void* stream);

/* Symmetric block quantisation. With v = x + error (error NULL: x), for each block of `block` elements (the last may be shorter):
 *   scale = max|v| / limit;  q = rint(v * (1 / scale)) within [-limit, limit];  error = v - q * scale
 * where limit is 127 for 8 bits and 7 for 4. q: int8_t[n], or [(n + 1) / 2] bytes with two's complement nibbles, element 2i in the low one
 * of byte i; block must be even then. scales: [ceil(n / block)].
 * A block whose scale would be denormal gets scale 0 and q 0. A block with a NaN or an infinity gets scale NaN and q 0, so that what is made
 * from it is NaN; its error stays as it was. */
FW_API int fw_quantize(const void* x, int dtype, int64_t n, int bits, int block, void* q, float* scales, float* error, void* stream);

/* out = q * scale, or out += q * scale with add (added in fp32, rounded once). */
FW_API int fw_dequantize(const void* q, int bits, const float* scales, int64_t n, int block, void* out, int dtype, int add, void* stream);

/* The inner step of a quantised reduce: the sum over `parts` of dequantised q, quantised again. q: [parts, bytes], scales: [parts, blocks],
 * with bytes and blocks of one part as for fw_quantize. The sum is in fp32, part 0 first. q_out and scales_out (both or neither) are the
 * sum quantised, sum_out is the sum in sum_dtype; what is NULL is not wanted. */
FW_API int fw_dequantize_sum_quantize(const void* q, const float* scales, int64_t parts, int64_t n, int bits, int block, void* q_out,
                                      float* scales_out, void* sum_out, int sum_dtype, void* stream);
#define FW_LARGEST_FUSED_BLOCK 4096 /* fw_copies and, with q_out, fw_dequantize_sum_quantize refuse larger blocks */

/* NormalFloat4 of QLoRA (arXiv:2305.14314, appendix E), packed as bitsandbytes does: element 2i in the HIGH nibble of byte i.
 * out = table[nibble] * absmax[i / block]. q: [(n + 1) / 2], absmax: [ceil(n / block)]. block must be even. */
FW_API int fw_nf4_dequantize(const uint8_t* q, const float* absmax, int64_t n, int block, void* out, int dtype, void* stream);

/* CPU only, for scripts/bench/kernels.py: moves the bytes of fw_adamw on n elements with nothing to compute; the values do not change.
 * Either an fp32 gradient and no copy, or a bf16 gradient and a bf16 copy. */
FW_API int fw_move_like_adamw(float* master, float* exp_avg, float* exp_avg_sq, const void* grad, int grad_dtype, const fw_copies* copies,
                              int64_t n, void* stream);

/* ---- layers of a decoder ----
 * Tensors whose dtype is not written are in `dtype`. */

/* sum = x + residual (residual and sum: both or neither; rounded to dtype first), s = sum or x;
 * rstd = 1 / sqrt(mean(s^2) + eps) per row;  y = s * rstd * weight. x, y: [rows, cols], weight: [cols], rstd: [rows].
 * sum may be x or residual. */
FW_API int fw_rms_norm_forward(const void* x, const void* residual, const void* weight, void* y, void* sum, float* rstd, int64_t rows,
                               int64_t cols, float eps, int dtype, void* stream);

/* Gradients with respect to s and the weight; dsum (or NULL) is what else flows into the sum and is added to dx.
 * dweight: [cols] fp32, written. partial: [n_partial, cols] fp32 scratch; its rows are summed in a fixed order, so the result does not
 * depend on timing. dx may be dy. */
FW_API int fw_rms_norm_backward(const void* dy, const void* dsum, const void* x_or_sum, const void* weight, const float* rstd, void* dx,
                                float* dweight, float* partial, int64_t n_partial, int64_t rows, int64_t cols, int dtype, void* stream);

/* Rotary position embedding, pairs (i, i + head_dim / 2). x, y: [batch, tokens, heads, head_dim]; cos, sin: fp32
 * [tokens, head_dim / 2], batch b starts at b * cos_batch_stride (0: the same for all). inverse: turn back (the gradient). y may be x. */
FW_API int fw_rope(const void* x, const float* cos, const float* sin, void* y, int64_t batch, int64_t tokens, int64_t heads,
                   int64_t head_dim, int64_t cos_batch_stride, int inverse, int dtype, void* stream);

/* y = gate / (1 + exp(-gate)) * up */
FW_API int fw_swiglu_forward(const void* gate, const void* up, void* y, int64_t n, int dtype, void* stream);

/* dgate may be gate or dy, dup may be up. */
FW_API int fw_swiglu_backward(const void* dy, const void* gate, const void* up, void* dgate, void* dup, int64_t n, int dtype, void* stream);

/* Softmax cross-entropy, the gradient written over the logits. logits: [rows, vocab] with row_stride >= vocab elements between rows;
 * loss: [rows] = log(sum(exp(logits))) - logits[label]. with_grad: logits becomes (softmax - onehot(label)) * grad_factor, else it is only
 * read. A row with label -100 has loss 0 and gradient 0. Other labels outside [0, vocab) have loss NaN and gradient NaN. */
FW_API int fw_cross_entropy(void* logits, const int64_t* labels, float* loss, int64_t rows, int64_t vocab, int64_t row_stride,
                            float grad_factor, int with_grad, int dtype, void* stream);

/* Tokens of one chunk of fw_embedding_backward. */
#define FW_EMBEDDING_CHUNK 64

/* CUDA only. Rows of the gradient of an embedding: dweight[id] = sum of dy[t] over the tokens t with that id, in their order. sorted_ids and
 * order are a stable sort of the tokens' ids: [tokens]; dy: [tokens, cols]; dweight: [vocab, cols], of which only rows with a token are
 * written. Ids equal to padding_index or outside [0, vocab) are left out. partial: [ceil(tokens / FW_EMBEDDING_CHUNK), 2, cols] fp32. */
FW_API int fw_embedding_backward(const void* dy, const int64_t* sorted_ids, const int64_t* order, void* dweight, float* partial,
                                 int64_t tokens, int64_t cols, int64_t vocab, int64_t padding_index, int dtype, void* stream);

/* CUDA only. y = x where |x| is among the k largest of its row (1 <= k <= cols; of equal ones those with the lower index), else 0. NaN counts
 * as largest. x, y: [rows, cols]; y may be x. */
FW_API int fw_top_k(const void* x, void* y, int64_t rows, int64_t cols, int64_t k, int dtype, void* stream);

/* CUDA only. Attention in which each block of queries sees some blocks of keys, the same for all heads. q, out: [batch, heads, tokens,
 * head_dim]; k, v: [batch, kv_heads, tokens, head_dim], kv_heads divides heads; head_dim <= 128 and a multiple of 8; block a multiple of 32.
 * Block i of queries sees the blocks columns[offsets[i]] ... columns[offsets[i + 1] - 1] of keys, ascending; causal: and in them only keys
 * up to the query. log_sum_exp: [batch, heads, tokens] of scale * q k; a query that sees nothing has output 0. */
FW_API int fw_sparse_attention_forward(const void* q, const void* k, const void* v, const int32_t* offsets, const int32_t* columns, void* out,
                                       float* log_sum_exp, int64_t batch, int64_t heads, int64_t kv_heads, int64_t tokens, int64_t head_dim,
                                       int64_t block, float scale, int causal, int dtype, void* stream);

/* CUDA only. transposed_*: which blocks of queries see each block of keys. delta: [batch, heads, tokens] fp32 scratch. */
FW_API int fw_sparse_attention_backward(const void* dout, const void* q, const void* k, const void* v, const void* out,
                                        const float* log_sum_exp, const int32_t* offsets, const int32_t* columns,
                                        const int32_t* transposed_offsets, const int32_t* transposed_columns, void* dq, void* dk, void* dv,
                                        float* delta, int64_t batch, int64_t heads, int64_t kv_heads, int64_t tokens, int64_t head_dim,
                                        int64_t block, float scale, int causal, int dtype, void* stream);

#ifdef __cplusplus
}
#endif
#endif
