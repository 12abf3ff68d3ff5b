/* Sum of squares and casts. */
#ifndef FRAMEWORK_CPU_FLAT_LOOPS_H
#define FRAMEWORK_CPU_FLAT_LOOPS_H

#include "framework_kernels.h"
#include "lanes.h"

namespace FW_ISA {

typedef float HalfFloats __attribute__((vector_size(2 * kLanes)));
typedef double Doubles __attribute__((vector_size(4 * kLanes)));

/* One instruction, where GCC 12 makes three of the conversion and sends AVX2's through memory. */
FW_INLINE Doubles to_doubles(HalfFloats x) {
#if defined(__AVX512F__)
    return (Doubles)_mm512_cvtps_pd((__m256)x);
#elif defined(__AVX2__)
    return (Doubles)_mm256_cvtps_pd((__m128)x);
#else
    return __builtin_convertvector(x, Doubles);
#endif
}

FW_INLINE void add_squares(Floats x, Doubles* sums) {
    HalfFloats half[2];
    memcpy(half, &x, sizeof x);
    for (int k = 0; k < 2; ++k) {
        const Doubles wide = to_doubles(half[k]);
        sums[k] += wide * wide;
    }
}

/* Eight vectors of sums, so that one addition need not wait for the one before. */
template <class Dtype>
static double square_sum_of(const void* x, int64_t start, int64_t stop) {
    Doubles sums[8] = {};
    int64_t i = start;
    for (; i + 4 * kLanes <= stop; i += 4 * kLanes) {
#pragma GCC unroll 4
        for (int k = 0; k < 4; ++k) add_squares(load<Dtype>(x, i + k * kLanes), sums + 2 * k);
    }
    for (; i + kLanes <= stop; i += kLanes) add_squares(load<Dtype>(x, i), sums);
    if (i < stop) add_squares(load_some<Dtype>(x, i, stop - i, 0.f), sums);
    double total = 0;
    for (int k = 0; k < 8; ++k)
        for (int lane = 0; lane < kLanes / 2; ++lane) total += sums[k][lane];
    return total;
}

static double square_sum(const void* x, int dtype, int64_t start, int64_t stop) {
    if (dtype == FW_F32) return square_sum_of<F32>(x, start, stop);
    if (dtype == FW_BF16) return square_sum_of<BF16>(x, start, stop);
    return square_sum_of<F16>(x, start, stop);
}

template <class From, class To>
static void cast_plainly(const void* src, void* dst, int64_t start, int64_t stop) {
    int64_t i = start;
    for (; i + 2 * kLanes <= stop; i += 2 * kLanes) {
        const Floats first = load<From>(src, i), second = load<From>(src, i + kLanes);
        store<To>(dst, i, first);
        store<To>(dst, i + kLanes, second);
    }
    for (; i + kLanes <= stop; i += kLanes) store<To>(dst, i, load<From>(src, i));
    if (i < stop) store_some<To>(dst, i, stop - i, load_some<From>(src, i, stop - i, 0.f));
}

FW_INLINE Floats as_stored(F32, Floats x) { return x; }
FW_INLINE Halves as_stored(BF16, Floats x) { return Access<BF16>::round(x); }
FW_INLINE Halves as_stored(F16, Floats x) { return Access<F16>::round(x); }

template <class From, class To>
static void cast_past_cache(const void* src, void* dst, int64_t start, int64_t stop) {
    typename To::Element* const to = (typename To::Element*)dst;
    const int64_t aligned = start + until_streamable(to + start, stop - start);
    cast_plainly<From, To>(src, dst, start, aligned);
    int64_t i = aligned;
    for (; i + 2 * kLanes <= stop; i += 2 * kLanes) {
        const Floats first = load<From>(src, i), second = load<From>(src, i + kLanes);
        stream(to + i, as_stored(To{}, first));
        stream(to + i + kLanes, as_stored(To{}, second));
    }
    end_of_streaming();
    cast_plainly<From, To>(src, dst, i, stop);
}

template <class From, class To>
static void cast_between(const void* src, void* dst, int64_t start, int64_t stop, bool stream) {
    if (stream) return cast_past_cache<From, To>(src, dst, start, stop);
    cast_plainly<From, To>(src, dst, start, stop);
}

template <class From>
static void cast_from(const void* src, void* dst, int dst_dtype, int64_t start, int64_t stop, bool stream) {
    if (dst_dtype == FW_F32) return cast_between<From, F32>(src, dst, start, stop, stream);
    if (dst_dtype == FW_BF16) return cast_between<From, BF16>(src, dst, start, stop, stream);
    cast_between<From, F16>(src, dst, start, stop, stream);
}

static void cast(const void* src, int src_dtype, void* dst, int dst_dtype, int64_t start, int64_t stop, bool stream) {
    if (src_dtype == FW_F32) return cast_from<F32>(src, dst, dst_dtype, start, stop, stream);
    if (src_dtype == FW_BF16) return cast_from<BF16>(src, dst, dst_dtype, start, stop, stream);
    cast_from<F16>(src, dst, dst_dtype, start, stop, stream);
}

}  // namespace FW_ISA
#endif
