/* Block quantisation to int8 and int4 and back, and NF4.
 *
 * Everything works on int8: 4-bit values are unpacked into, or packed from, a short buffer of bytes in the first-level cache.
 * Blocks may have any (for 4 bits: any even) length; the arithmetic and its rounding are those of the references, bit for bit in q and scales.
 */
#ifndef FRAMEWORK_CPU_QUANTIZE_LOOPS_H
#define FRAMEWORK_CPU_QUANTIZE_LOOPS_H

#include <float.h>

#include "framework_kernels.h"
#include "lanes.h"
#include "loops.h"

namespace FW_ISA {

constexpr int64_t kChunk = 256; /* elements of the buffer */

/* Not by __builtin_convertvector where it can be helped: GCC 12 takes the bytes out of the vector one by one. */
FW_INLINE Floats bytes_to_floats(const int8_t* q) {
#if defined(__AVX512F__)
    return (Floats)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(read<__m128i>(q)));
#elif defined(__AVX2__)
    return (Floats)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)q)));
#else
    return to_floats(__builtin_convertvector(read<Bytes>(q), Ints));
#endif
}

FW_INLINE void write_bytes(int8_t* to, Ints q) {
#if defined(__AVX512F__)
    write(to, _mm512_cvtepi32_epi8((__m512i)q));
#elif defined(__AVX2__)
    const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128((__m256i)q), _mm256_extracti128_si256((__m256i)q, 1));
    _mm_storel_epi64((__m128i*)to, _mm_packs_epi16(words, words));
#else
    write(to, __builtin_convertvector(q, Bytes));
#endif
}

/* count elements, starting with an even one; element 2i in the low nibble of byte i */
static void unpack_int4(const uint8_t* packed, int64_t count, int8_t* out) {
    for (int64_t i = 0; i < count / 2; ++i) {
        out[2 * i] = (int8_t)((int8_t)(packed[i] << 4) >> 4);
        out[2 * i + 1] = (int8_t)((int8_t)packed[i] >> 4);
    }
    if (count % 2) out[count - 1] = (int8_t)((int8_t)(packed[count / 2] << 4) >> 4);
}

static void pack_int4(const int8_t* q, int64_t count, uint8_t* packed) {
    for (int64_t i = 0; i < count / 2; ++i) packed[i] = (uint8_t)((q[2 * i] & 15) | ((uint8_t)q[2 * i + 1] << 4));
    if (count % 2) packed[count / 2] = (uint8_t)(q[count - 1] & 15);
}

/* ---- to integers */
template <class Dtype>
FW_INLINE Floats with_error(const void* x, const float* error, int64_t i) {
    const Floats value = load<Dtype>(x, i);
    return error ? value + read<Floats>(error + i) : value;
}

template <class Dtype>
FW_INLINE Floats some_with_error(const void* x, const float* error, int64_t i, int64_t count) {
    const Floats value = load_some<Dtype>(x, i, count, 0.f);
    return error ? value + load_some<F32>(error, i, count, 0.f) : value;
}

/* NaN if there is a NaN or an infinity among the values */
template <class Dtype>
static float largest_magnitude(const void* x, const float* error, int64_t start, int64_t stop) {
    Floats most[2] = {}, poison = {}; /* poison: 0 * x is NaN for what is not finite, and stays so */
    int64_t i = start;
    for (; i + 2 * kLanes <= stop; i += 2 * kLanes) {
        for (int k = 0; k < 2; ++k) {
            const Floats v = with_error<Dtype>(x, error, i + k * kLanes);
            most[k] = maximum(absolute(v), most[k]);
            poison += v * 0.f;
        }
    }
    for (; i < stop; i += kLanes) {
        const Floats v = stop - i >= kLanes ? with_error<Dtype>(x, error, i) : some_with_error<Dtype>(x, error, i, stop - i);
        most[0] = maximum(absolute(v), most[0]);
        poison += v * 0.f;
    }
    return largest_lane(maximum(most[0], most[1])) + sum_of_lanes(poison);
}

/* q and the new error of values [start, stop), at most kChunk. No clamping: |v| <= 127 scale (1 + 2^-22) rounds to 127 at most. */
template <class Dtype>
static void round_chunk(const void* x, float* error, float scale, float inverse, int8_t* q, int64_t start, int64_t stop) {
    int64_t i = start;
    for (; i + kLanes <= stop; i += kLanes) {
        const Floats v = with_error<Dtype>(x, error, i);
        const Ints rounded = to_nearest(v * inverse);
        write_bytes(q + (i - start), rounded);
        if (error) write(error + i, v - to_floats(rounded) * scale);
    }
    if (i < stop) {
        const Floats v = some_with_error<Dtype>(x, error, i, stop - i);
        const Ints rounded = to_nearest(v * inverse);
        for (int64_t k = 0; k < stop - i; ++k) q[i - start + k] = (int8_t)rounded[k];
        if (error) store_some<F32>(error, i, stop - i, v - to_floats(rounded) * scale);
    }
}

FW_INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

template <class Dtype>
static void quantize_from(const void* x, float* error, QuantFormat format, void* q, float* scales, int64_t start, int64_t stop) {
    const float limit = format.bits == 8 ? 127.f : 7.f;
    int8_t buffer[kChunk];
    for (int64_t first = start; first < stop; first += format.block) {
        const int64_t last = smaller(first + format.block, stop);
        float scale = largest_magnitude<Dtype>(x, error, first, last) / limit;
        const bool broken = !(scale <= FLT_MAX);
        if (broken) scale = __builtin_nanf("");
        if (scale < FLT_MIN) scale = 0.f;
        scales[first / format.block] = scale;
        const float inverse = scale > 0.f ? 1.f / scale : 0.f;
        for (int64_t i = first; i < last; i += kChunk) {
            const int64_t end = smaller(i + kChunk, last);
            int8_t* const to = format.bits == 8 ? (int8_t*)q + i : buffer;
            if (broken)
                memset(to, 0, end - i);
            else
                round_chunk<Dtype>(x, error, scale, inverse, to, i, end);
            if (format.bits == 4) pack_int4(buffer, end - i, (uint8_t*)q + i / 2);
        }
    }
}

static void quantize(const void* x, int dtype, float* error, QuantFormat format, void* q, float* scales, int64_t start, int64_t stop) {
    if (dtype == FW_F32) return quantize_from<F32>(x, error, format, q, scales, start, stop);
    if (dtype == FW_BF16) return quantize_from<BF16>(x, error, format, q, scales, start, stop);
    quantize_from<F16>(x, error, format, q, scales, start, stop);
}

/* ---- from integers */
template <class Dtype, bool kAdd>
static void expand_chunk(const int8_t* q, float scale, void* out, int64_t i, int64_t count) {
    int64_t k = 0;
    for (; k + kLanes <= count; k += kLanes) {
        const Floats value = bytes_to_floats(q + k) * scale;
        store<Dtype>(out, i + k, kAdd ? load<Dtype>(out, i + k) + value : value);
    }
    if (k < count) {
        int8_t rest[kLanes] = {};
        memcpy(rest, q + k, count - k);
        const Floats value = bytes_to_floats(rest) * scale;
        store_some<Dtype>(out, i + k, count - k, kAdd ? load_some<Dtype>(out, i + k, count - k, 0.f) + value : value);
    }
}

FW_INLINE const int8_t* chunk_of(const void* q, int bits, int64_t i, int64_t count, int8_t* buffer) {
    if (bits == 8) return (const int8_t*)q + i;
    unpack_int4((const uint8_t*)q + i / 2, count, buffer);
    return buffer;
}

template <class Dtype, bool kAdd>
static void dequantize_to(const void* q, const float* scales, QuantFormat format, void* out, int64_t start, int64_t stop) {
    int8_t buffer[kChunk];
    for (int64_t first = start; first < stop; first += format.block) {
        const int64_t last = smaller(first + format.block, stop);
        for (int64_t i = first; i < last; i += kChunk) {
            const int64_t count = smaller(kChunk, last - i);
            expand_chunk<Dtype, kAdd>(chunk_of(q, format.bits, i, count, buffer), scales[first / format.block], out, i, count);
        }
    }
}

template <class Dtype>
static void dequantize_into(const void* q, const float* scales, QuantFormat format, void* out, bool add, int64_t start, int64_t stop) {
    if (add) return dequantize_to<Dtype, true>(q, scales, format, out, start, stop);
    dequantize_to<Dtype, false>(q, scales, format, out, start, stop);
}

static void dequantize(const void* q, const float* scales, QuantFormat format, void* out, int dtype, bool add, int64_t start, int64_t stop) {
    if (dtype == FW_F32) return dequantize_into<F32>(q, scales, format, out, add, start, stop);
    if (dtype == FW_BF16) return dequantize_into<BF16>(q, scales, format, out, add, start, stop);
    dequantize_into<F16>(q, scales, format, out, add, start, stop);
}

static void add_dequantized(const void* q, float scale, int bits, float* sum, bool first, int64_t start, int64_t stop) {
    int8_t buffer[kChunk];
    for (int64_t i = start; i < stop; i += kChunk) {
        const int64_t count = smaller(kChunk, stop - i);
        const int8_t* const from = chunk_of(q, bits, i, count, buffer);
        if (first)
            expand_chunk<F32, false>(from, scale, sum, i - start, count);
        else
            expand_chunk<F32, true>(from, scale, sum, i - start, count);
    }
}

/* ---- NF4: the quantiles of a normal distribution, as published with QLoRA */
alignas(64) static const float kNormalFloat4[16] = {
    -1.0f, -0.6961928009986877f, -0.5250730514526367f, -0.39491748809814453f, -0.28444138169288635f, -0.18477343022823334f,
    -0.09105003625154495f, 0.0f, 0.07958029955625534f, 0.16093020141124725f, 0.24611230194568634f, 0.33791524171829224f,
    0.44070982933044434f, 0.5626170039176941f, 0.7229568362236023f, 1.0f};

FW_INLINE Floats look_up(const int8_t* index) {
#if defined(__AVX512F__)
    return (Floats)_mm512_permutexvar_ps(_mm512_cvtepi8_epi32(read<__m128i>(index)), _mm512_load_ps(kNormalFloat4));
#elif defined(__AVX2__)
    const __m256i wide = _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)index));
    const __m256 low = _mm256_permutevar8x32_ps(_mm256_load_ps(kNormalFloat4), wide);
    const __m256 high = _mm256_permutevar8x32_ps(_mm256_load_ps(kNormalFloat4 + 8), wide);
    return (Floats)_mm256_blendv_ps(low, high, _mm256_castsi256_ps(_mm256_slli_epi32(wide, 28))); /* bit 3 becomes the sign */
#else
    Floats x = {};
    for (int k = 0; k < kLanes; ++k) x[k] = kNormalFloat4[index[k]];
    return x;
#endif
}

template <class Dtype>
static void nf4_dequantize_to(const uint8_t* q, const float* absmax, int block, void* out, int64_t start, int64_t stop) {
    int8_t index[kChunk + kLanes] = {};
    for (int64_t first = start; first < stop; first += block) {
        const float scale = absmax[first / block];
        const int64_t last = smaller(first + block, stop);
        for (int64_t i = first; i < last; i += kChunk) {
            const int64_t count = smaller(kChunk, last - i);
            for (int64_t k = 0; k < (count + 1) / 2; ++k) {
                index[2 * k] = (int8_t)(q[i / 2 + k] >> 4);
                index[2 * k + 1] = (int8_t)(q[i / 2 + k] & 15);
            }
            int64_t k = 0;
            for (; k + kLanes <= count; k += kLanes) store<Dtype>(out, i + k, look_up(index + k) * scale);
            if (k < count) store_some<Dtype>(out, i + k, count - k, look_up(index + k) * scale);
        }
    }
}

static void nf4_dequantize(const uint8_t* q, const float* absmax, int block, void* out, int dtype, int64_t start, int64_t stop) {
    if (dtype == FW_F32) return nf4_dequantize_to<F32>(q, absmax, block, out, start, stop);
    if (dtype == FW_BF16) return nf4_dequantize_to<BF16>(q, absmax, block, out, start, stop);
    nf4_dequantize_to<F16>(q, absmax, block, out, start, stop);
}

}  // namespace FW_ISA
#endif
