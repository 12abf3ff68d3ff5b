/* RMSNorm, rotary embedding, SwiGLU and cross-entropy on rows. */
#ifndef FRAMEWORK_CPU_LAYER_LOOPS_H
#define FRAMEWORK_CPU_LAYER_LOOPS_H

#include <float.h>

#include "framework_kernels.h"
#include "lanes.h"

namespace FW_ISA {

/* e^x within 2 ulp (tests/kernels/test_cpu_layers.py); 0 below -104, infinite from 88.73 on, NaN for NaN.
 * x = n ln 2 + r with |r| <= ln 2 / 2; e^r by its series to the 7th power, error 2^-28. 2^n as two factors, so that each is a normal number. */
FW_INLINE Floats exponential(Floats x) {
    x = x < -104.f ? all(-104.f) : (x > 89.f ? all(89.f) : x);
    const Ints n = to_nearest(x * 1.44269504f);
    const Floats whole = to_floats(n);
    const Floats r = (x - whole * 0.693359375f) - whole * -2.12194440e-4f; /* ln 2 in two parts, the first with few bits */
    Floats sum = r * 1.98412698e-4f + 1.38888889e-3f;
    sum = sum * r + 8.33333333e-3f;
    sum = sum * r + 4.16666667e-2f;
    sum = sum * r + 1.66666667e-1f;
    sum = sum * r + 0.5f;
    sum = sum * r + 1.f;
    sum = sum * r + 1.f;
    const Ints half = n >> 1;
    return sum * (Floats)((half + 127) << 23) * (Floats)((n - half + 127) << 23);
}

/* body(i, kLanes or fewer) over [0, n): whole vectors first. With `if constexpr` on a literal count both cases are made from one body. */
template <class Body>
FW_INLINE void for_vectors(int64_t n, const Body& body) {
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) body(i, (int64_t)kLanes);
    if (i < n) body(i, n - i);
}

template <class Dtype>
FW_INLINE Floats load_up_to(const void* tensor, int64_t i, int64_t count) {
    return count == kLanes ? load<Dtype>(tensor, i) : load_some<Dtype>(tensor, i, count, 0.f);
}

template <class Dtype>
FW_INLINE void store_up_to(void* tensor, int64_t i, int64_t count, Floats x) {
    if (count == kLanes) return store<Dtype>(tensor, i, x);
    store_some<Dtype>(tensor, i, count, x);
}

/* ---- RMSNorm */
template <class Dtype>
FW_INLINE Floats rounded(Floats x) {
    typename Dtype::Element buffer[kLanes];
    Access<Dtype>::store(buffer, x);
    return Access<Dtype>::load(buffer);
}

template <class Dtype>
static void rms_norm_forward_rows(const void* x, const void* residual, const void* weight, void* y, void* sum, float* rstd, int64_t cols,
                                  float eps, int64_t start, int64_t stop) {
    for (int64_t row = start; row < stop; ++row) {
        const int64_t at = row * cols;
        Floats squares = {};
        for_vectors(cols, [&](int64_t i, int64_t count) {
            Floats value = load_up_to<Dtype>(x, at + i, count);
            if (residual) {
                value = rounded<Dtype>(value + load_up_to<Dtype>(residual, at + i, count));
                store_up_to<Dtype>(sum, at + i, count, value);
            }
            squares += value * value;
        });
        const float scale = 1.f / __builtin_sqrtf(sum_of_lanes(squares) / (float)cols + eps);
        rstd[row] = scale;
        const void* const normed = residual ? sum : x;
        for_vectors(cols, [&](int64_t i, int64_t count) {
            store_up_to<Dtype>(y, at + i, count, load_up_to<Dtype>(normed, at + i, count) * scale * load_up_to<Dtype>(weight, i, count));
        });
    }
}

static void rms_norm_forward(const void* x, const void* residual, const void* weight, void* y, void* sum, float* rstd, int64_t cols, float eps,
                             int dtype, int64_t start, int64_t stop) {
    if (dtype == FW_F32) return rms_norm_forward_rows<F32>(x, residual, weight, y, sum, rstd, cols, eps, start, stop);
    if (dtype == FW_BF16) return rms_norm_forward_rows<BF16>(x, residual, weight, y, sum, rstd, cols, eps, start, stop);
    rms_norm_forward_rows<F16>(x, residual, weight, y, sum, rstd, cols, eps, start, stop);
}

/* dx = rstd (dy weight - x rstd^2 mean(dy weight x)) + dsum;  partial += dy x rstd */
template <class Dtype>
static void rms_norm_backward_rows(const void* dy, const void* dsum, const void* x, const void* weight, const float* rstd, void* dx,
                                   float* partial, int64_t cols, int64_t start, int64_t stop) {
    memset(partial, 0, cols * sizeof(float));
    for (int64_t row = start; row < stop; ++row) {
        const int64_t at = row * cols;
        const float scale = rstd[row];
        Floats products = {};
        for_vectors(cols, [&](int64_t i, int64_t count) {
            const Floats g = load_up_to<Dtype>(dy, at + i, count), value = load_up_to<Dtype>(x, at + i, count);
            products += g * load_up_to<Dtype>(weight, i, count) * value;
            store_up_to<F32>(partial, i, count, load_up_to<F32>(partial, i, count) + g * value * scale);
        });
        const float mean = sum_of_lanes(products) / (float)cols * scale * scale;
        for_vectors(cols, [&](int64_t i, int64_t count) {
            const Floats g = load_up_to<Dtype>(dy, at + i, count) * load_up_to<Dtype>(weight, i, count);
            Floats result = (g - load_up_to<Dtype>(x, at + i, count) * mean) * scale;
            if (dsum) result += load_up_to<Dtype>(dsum, at + i, count);
            store_up_to<Dtype>(dx, at + i, count, result);
        });
    }
}

static void rms_norm_backward(const void* dy, const void* dsum, const void* x, const void* weight, const float* rstd, void* dx, float* partial,
                              int64_t cols, int dtype, int64_t start, int64_t stop) {
    if (dtype == FW_F32) return rms_norm_backward_rows<F32>(dy, dsum, x, weight, rstd, dx, partial, cols, start, stop);
    if (dtype == FW_BF16) return rms_norm_backward_rows<BF16>(dy, dsum, x, weight, rstd, dx, partial, cols, start, stop);
    rms_norm_backward_rows<F16>(dy, dsum, x, weight, rstd, dx, partial, cols, start, stop);
}

/* sum[start, stop) of the columns of rows [n_rows, cols], the first row first */
static void add_rows(const float* rows, int64_t n_rows, int64_t cols, float* sum, int64_t start, int64_t stop) {
    for_vectors(stop - start, [&](int64_t i, int64_t count) {
        Floats total = {};
        for (int64_t row = 0; row < n_rows; ++row) total += load_up_to<F32>(rows, row * cols + start + i, count);
        store_up_to<F32>(sum, start + i, count, total);
    });
}

/* ---- rotary embedding of all heads of one token */
template <class Dtype>
static void rope_heads(const void* x, const float* cos, const float* sin, void* y, int64_t heads, int64_t head_dim, float sign) {
    const int64_t pairs = head_dim / 2;
    for (int64_t head = 0; head < heads; ++head) {
        const int64_t first = head * head_dim, second = first + pairs;
        for_vectors(pairs, [&](int64_t i, int64_t count) {
            const Floats a = load_up_to<Dtype>(x, first + i, count), b = load_up_to<Dtype>(x, second + i, count);
            const Floats c = load_up_to<F32>(cos, i, count), s = load_up_to<F32>(sin, i, count) * sign;
            store_up_to<Dtype>(y, first + i, count, a * c - b * s);
            store_up_to<Dtype>(y, second + i, count, b * c + a * s);
        });
    }
}

static void rope(const void* x, const float* cos, const float* sin, void* y, int64_t heads, int64_t head_dim, float sign, int dtype) {
    if (dtype == FW_F32) return rope_heads<F32>(x, cos, sin, y, heads, head_dim, sign);
    if (dtype == FW_BF16) return rope_heads<BF16>(x, cos, sin, y, heads, head_dim, sign);
    rope_heads<F16>(x, cos, sin, y, heads, head_dim, sign);
}

/* ---- SwiGLU */
FW_INLINE Floats sigmoid(Floats x) { return 1.f / (1.f + exponential(-x)); }

template <class Dtype>
static void swiglu_forward_of(const void* gate, const void* up, void* y, int64_t start, int64_t stop) {
    for_vectors(stop - start, [&](int64_t i, int64_t count) {
        const Floats g = load_up_to<Dtype>(gate, start + i, count), u = load_up_to<Dtype>(up, start + i, count);
        store_up_to<Dtype>(y, start + i, count, g * sigmoid(g) * u);
    });
}

template <class Dtype>
static void swiglu_backward_of(const void* dy, const void* gate, const void* up, void* dgate, void* dup, int64_t start, int64_t stop) {
    for_vectors(stop - start, [&](int64_t i, int64_t count) {
        const Floats d = load_up_to<Dtype>(dy, start + i, count);
        const Floats g = load_up_to<Dtype>(gate, start + i, count), u = load_up_to<Dtype>(up, start + i, count);
        const Floats s = sigmoid(g);
        store_up_to<Dtype>(dgate, start + i, count, d * u * s * (1.f + g * (1.f - s)));
        store_up_to<Dtype>(dup, start + i, count, d * g * s);
    });
}

static void swiglu_forward(const void* gate, const void* up, void* y, int dtype, int64_t start, int64_t stop) {
    if (dtype == FW_F32) return swiglu_forward_of<F32>(gate, up, y, start, stop);
    if (dtype == FW_BF16) return swiglu_forward_of<BF16>(gate, up, y, start, stop);
    swiglu_forward_of<F16>(gate, up, y, start, stop);
}

static void swiglu_backward(const void* dy, const void* gate, const void* up, void* dgate, void* dup, int dtype, int64_t start, int64_t stop) {
    if (dtype == FW_F32) return swiglu_backward_of<F32>(dy, gate, up, dgate, dup, start, stop);
    if (dtype == FW_BF16) return swiglu_backward_of<BF16>(dy, gate, up, dgate, dup, start, stop);
    swiglu_backward_of<F16>(dy, gate, up, dgate, dup, start, stop);
}

/* ---- cross-entropy of one row: one pass for the loss, in pieces that stay in the first-level cache while their largest logit is found and
 * their exponentials are summed; a second pass for the gradient */
constexpr int64_t kLogits = 2048;

template <class Dtype>
static float largest_logit(const void* logits, int64_t start, int64_t stop) {
    Floats most = all(-__builtin_inff());
    for_vectors(stop - start, [&](int64_t i, int64_t count) {
        const Floats x = count == kLanes ? load<Dtype>(logits, start + i) : load_some<Dtype>(logits, start + i, count, -__builtin_inff());
        most = maximum(x, most);
    });
    return largest_lane(most);
}

template <class Dtype>
static float sum_of_exponentials(const void* logits, float most, int64_t start, int64_t stop) {
    Floats sum = {};
    for_vectors(stop - start, [&](int64_t i, int64_t count) {
        const Floats x = count == kLanes ? load<Dtype>(logits, start + i) : load_some<Dtype>(logits, start + i, count, -__builtin_inff());
        sum += exponential(x - most);
    });
    return sum_of_lanes(sum);
}

template <class Dtype>
static float cross_entropy_row(void* logits, int64_t label, int64_t vocab, float grad_factor, bool with_grad) {
    float most = -FLT_MAX, sum = 0; /* not minus infinity, which less itself is NaN */
    for (int64_t at = 0; at < vocab; at += kLogits) {
        const int64_t stop = at + kLogits < vocab ? at + kLogits : vocab;
        const float here = largest_logit<Dtype>(logits, at, stop);
        if (here > most) {
            sum *= __builtin_expf(most - here);
            most = here;
        }
        sum += sum_of_exponentials<Dtype>(logits, most, at, stop);
    }
    typename Dtype::Element* const row = (typename Dtype::Element*)logits;
    const bool valid = label >= 0 && label < vocab;
    float loss = __builtin_nanf("");
    if (valid) loss = __builtin_logf(sum) + (most - load_some<Dtype>(row, label, 1, 0.f)[0]);
    if (!with_grad) return loss;
    const float factor = valid ? grad_factor : __builtin_nanf("");
    const float label_logit = valid ? load_some<Dtype>(row, label, 1, 0.f)[0] : 0.f;
    const float probability = exponential(all(label_logit - most))[0] / sum;
    const float scale = factor / sum;
    for_vectors(vocab, [&](int64_t i, int64_t count) {
        store_up_to<Dtype>(row, i, count, exponential(load_up_to<Dtype>(row, i, count) - most) * scale);
    });
    if (valid) store_some<Dtype>(row, label, 1, all((probability - 1.f) * factor));
    return loss;
}

static float cross_entropy(void* logits, int64_t label, int64_t vocab, float grad_factor, bool with_grad, int dtype) {
    if (dtype == FW_F32) return cross_entropy_row<F32>(logits, label, vocab, grad_factor, with_grad);
    if (dtype == FW_BF16) return cross_entropy_row<BF16>(logits, label, vocab, grad_factor, with_grad);
    return cross_entropy_row<F16>(logits, label, vocab, grad_factor, with_grad);
}

}  // namespace FW_ISA
#endif
