/* The loops that are compiled once for every instruction set, as a table of functions: the seam between the two halves of the library.
 *
 * On this side of the table (loops.cpp) everything knows about vectors and nothing about threads; on the other (optimizers.cpp, flat.cpp, ...)
 * arguments are checked and work is split over threads, compiled for the baseline. Ranges [start, stop) are elements.
 */
#ifndef FRAMEWORK_CPU_LOOPS_H
#define FRAMEWORK_CPU_LOOPS_H

#include <stdint.h>

/* One optimizer call, the same for all ranges and threads. */
struct Shard {
    float* master; /* NULL: the master is copy and remainder, or, where that is NULL, the copy alone */
    uint16_t* remainder;
    float* state[2]; /* moments; NULL where there is none */
    const void* grad;
    int grad_dtype;
    void* copy; /* compute-dtype copy; NULL: not wanted */
    int copy_dtype;
    bool stream_copy; /* write it past the cache */
};

struct AdamWSettings {
    float grad_factor, beta2, one_minus_beta1, one_minus_beta2, eps;
    float decay;                    /* 1 - lr weight_decay */
    float step;                     /* lr / bias_correction1 */
    float inverse_bias_correction2; /* 1 / sqrt(1 - beta2^step) */
};

struct LionSettings {
    float grad_factor, beta1, one_minus_beta1, beta2, one_minus_beta2, decay, lr;
};

struct SgdSettings {
    float grad_factor, momentum, one_minus_dampening, weight_decay, lr;
    bool nesterov, first_step;
};

struct QuantFormat {
    int bits, block;
};

struct Loops {
    void (*adamw)(const Shard&, const AdamWSettings&, int64_t start, int64_t stop);
    void (*lion)(const Shard&, const LionSettings&, int64_t start, int64_t stop);
    void (*sgd)(const Shard&, const SgdSettings&, int64_t start, int64_t stop);
    /* The fp32 master of a shard that keeps copy and remainder, [start, stop) to out[0...]. */
    void (*join_master)(const uint16_t* copy, const uint16_t* remainder, int64_t start, int64_t stop, float* out);

    double (*square_sum)(const void* x, int dtype, int64_t start, int64_t stop);
    void (*cast)(const void* src, int src_dtype, void* dst, int dst_dtype, int64_t start, int64_t stop, bool stream);

    /* start is the first element of a block; the last block may be short. */
    void (*quantize)(const void* x, int dtype, float* error, QuantFormat, void* q, float* scales, int64_t start, int64_t stop);
    void (*dequantize)(const void* q, const float* scales, QuantFormat, void* out, int dtype, bool add, int64_t start, int64_t stop);
    /* One block, start to stop: sum[0...] (+)= q * scale. */
    void (*add_dequantized)(const void* q, float scale, int bits, float* sum, bool first, int64_t start, int64_t stop);
    void (*nf4_dequantize)(const uint8_t* q, const float* absmax, int block, void* out, int dtype, int64_t start, int64_t stop);

    /* Rows [start, stop); the arguments of the ABI's functions of the same name. */
    void (*rms_norm_forward)(const void* x, const void* residual, const void* weight, void* y, void* sum, float* rstd, int64_t cols, float eps,
                             int dtype, int64_t start, int64_t stop);
    void (*rms_norm_backward)(const void* dy, const void* dsum, const void* x, const void* weight, const float* rstd, void* dx, float* partial,
                              int64_t cols, int dtype, int64_t start, int64_t stop);
    void (*add_rows)(const float* rows, int64_t n_rows, int64_t cols, float* sum, int64_t start, int64_t stop);
    void (*rope)(const void* x, const float* cos, const float* sin, void* y, int64_t heads, int64_t head_dim, float sign, int dtype);
    void (*swiglu_forward)(const void* gate, const void* up, void* y, int dtype, int64_t start, int64_t stop);
    void (*swiglu_backward)(const void* dy, const void* gate, const void* up, void* dgate, void* dup, int dtype, int64_t start, int64_t stop);
    float (*cross_entropy)(void* logits, int64_t label, int64_t vocab, float grad_factor, bool with_grad, int dtype);

    /* What AdamW moves, without arithmetic: the limit that scripts/bench/kernels.py compares with. */
    void (*move)(const Shard&, int64_t start, int64_t stop);
};

namespace baseline { extern const Loops loops; }
#if defined(FW_X86_64)
namespace avx2 { extern const Loops loops; }
namespace avx512 { extern const Loops loops; }
#endif

/* The table in use (isa.cpp). */
const Loops& chosen_loops();

#endif
