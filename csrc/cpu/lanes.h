/* A register full of floats, and how it is read from and written to tensors of fp32, bf16 and fp16.
 *
 * GCC's vector types (Clang has them, too) do arithmetic, comparisons and `mask ? a : b` on any target; intrinsics are used only where the
 * compilers make bad code of them. Everything is in a namespace named after the instruction set, so that the linker cannot take a function
 * compiled for one as that of another: no standard header with inline functions is included here for the same reason.
 */
#ifndef FRAMEWORK_CPU_LANES_H
#define FRAMEWORK_CPU_LANES_H

#include <stdint.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define FW_INLINE static inline __attribute__((always_inline))

namespace FW_ISA {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

typedef float Floats __attribute__((vector_size(4 * kLanes)));
typedef int32_t Ints __attribute__((vector_size(4 * kLanes)));
typedef uint32_t Bits __attribute__((vector_size(4 * kLanes)));
typedef uint16_t Halves __attribute__((vector_size(2 * kLanes)));
typedef int8_t Bytes __attribute__((vector_size(kLanes)));

/* How a tensor's elements are stored. */
struct F32 { typedef float Element; };
struct BF16 { typedef uint16_t Element; };
struct F16 { typedef uint16_t Element; };

FW_INLINE Floats all(float x) { return Floats{} + x; }

template <class Vector, class Element>
FW_INLINE Vector read(const Element* from) {
    Vector v;
    memcpy(&v, from, sizeof v);
    return v;
}

template <class Element, class Vector>
FW_INLINE void write(Element* to, Vector v) {
    memcpy(to, &v, sizeof v);
}

FW_INLINE Bits widen(Halves h) {
#if defined(__AVX512F__)
    return (Bits)_mm512_cvtepu16_epi32((__m256i)h);
#elif defined(__AVX2__)
    return (Bits)_mm256_cvtepu16_epi32((__m128i)h);
#else
    return __builtin_convertvector(h, Bits);
#endif
}

/* Every lane below 65536. */
FW_INLINE Halves narrow(Bits b) {
#if defined(__AVX512F__)
    return (Halves)_mm512_cvtepi32_epi16((__m512i)b);
#elif defined(__AVX2__)
    return (Halves)_mm_packus_epi32(_mm256_castsi256_si128((__m256i)b), _mm256_extracti128_si256((__m256i)b, 1));
#else
    return __builtin_convertvector(b, Halves);
#endif
}

FW_INLINE Floats square_root(Floats x) {
#if defined(__AVX512F__)
    return (Floats)_mm512_sqrt_ps((__m512)x);
#elif defined(__AVX2__)
    return (Floats)_mm256_sqrt_ps((__m256)x);
#elif defined(__x86_64__)
    return (Floats)_mm_sqrt_ps((__m128)x);
#else
    for (int k = 0; k < kLanes; ++k) x[k] = __builtin_sqrtf(x[k]);
    return x;
#endif
}

/* To nearest even, for |x| < 2^22. Not written as a sum with 1.5 * 2^23 where it can be helped: a multiplication before it would be fused
 * with that sum, and rounded once where the references round twice. */
FW_INLINE Ints to_nearest(Floats x) {
#if defined(__AVX512F__)
    return (Ints)_mm512_cvtps_epi32((__m512)x);
#elif defined(__AVX2__)
    return (Ints)_mm256_cvtps_epi32((__m256)x);
#elif defined(__x86_64__)
    return (Ints)_mm_cvtps_epi32((__m128)x);
#else
    return __builtin_convertvector(x + 12582912.f - 12582912.f, Ints);
#endif
}

FW_INLINE Floats to_floats(Ints x) { return __builtin_convertvector(x, Floats); }

FW_INLINE Floats maximum(Floats a, Floats b) { return a > b ? a : b; } /* b where one is NaN */
FW_INLINE Floats absolute(Floats x) { return (Floats)((Bits)x & 0x7fffffffu); }

/* ---- fp16 where the processor has no instruction for it */
FW_INLINE Floats half_to_float(Bits h) {
    const Bits sign = (h & 0x8000u) << 16, shifted = (h & 0x7fffu) << 13;
    const Bits exponent = shifted & 0x0f800000u;
    const Bits normal = shifted + (112u << 23);
    /* A denormal's bits become the fraction of a number of known exponent, which is then subtracted: exact, and never a denormal float. */
    const Bits denormal = (Bits)((Floats)(shifted + (113u << 23)) - (Floats)(Bits{} + (113u << 23)));
    const Bits infinite = shifted + (224u << 23);
    const Bits magnitude = exponent == 0u ? denormal : (exponent == 0x0f800000u ? infinite : normal);
    return (Floats)(magnitude | sign);
}

FW_INLINE Bits float_to_half(Floats x) {
    const Bits bits = (Bits)x, sign = bits & 0x80000000u;
    const Ints magnitude = (Ints)(bits ^ sign); /* signed comparisons are cheaper, and the sign is gone */
    const Ints odd = (magnitude >> 13) & 1;
    const Ints normal = (magnitude - (112 << 23) + 0xfff + odd) >> 13;
    const Floats half = all(0.5f); /* its last bit is 2^-24, fp16's smallest denormal: the addition rounds */
    const Ints denormal = (Ints)((Floats)magnitude + half) - (Ints)half;
    const Ints special = magnitude > 0x7f800000 ? Ints{} + 0x7e00 : Ints{} + 0x7c00;
    const Ints finite = magnitude < (113 << 23) ? denormal : normal;
    return (Bits)(magnitude >= (143 << 23) ? special : finite) | (sign >> 16);
}

/* ---- load and store kLanes elements */
template <class Dtype>
struct Access;

template <>
struct Access<F32> {
    FW_INLINE Floats load(const float* from) { return read<Floats>(from); }
    FW_INLINE void store(float* to, Floats x) { write(to, x); }
};

template <>
struct Access<BF16> {
    FW_INLINE Floats load(const uint16_t* from) { return (Floats)(widen(read<Halves>(from)) << 16); }
    FW_INLINE Halves round(Floats x) {
        const Bits bits = (Bits)x;
        const Bits rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
        return narrow(x != x ? Bits{} + 0x7fc0u : rounded);
    }
    FW_INLINE void store(uint16_t* to, Floats x) { write(to, round(x)); }
};

template <>
struct Access<F16> {
#if defined(__AVX512F__)
    FW_INLINE Floats load(const uint16_t* from) { return (Floats)_mm512_cvtph_ps((__m256i)read<Halves>(from)); }
    FW_INLINE Halves round(Floats x) {
        return (Halves)_mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    }
#elif defined(__AVX2__)
    FW_INLINE Floats load(const uint16_t* from) { return (Floats)_mm256_cvtph_ps((__m128i)read<Halves>(from)); }
    FW_INLINE Halves round(Floats x) { return (Halves)_mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
#else
    FW_INLINE Floats load(const uint16_t* from) { return half_to_float(widen(read<Halves>(from))); }
    FW_INLINE Halves round(Floats x) { return narrow(float_to_half(x)); }
#endif
    FW_INLINE void store(uint16_t* to, Floats x) { write(to, round(x)); }
};

template <class Dtype>
FW_INLINE Floats load(const void* tensor, int64_t i) {
    return Access<Dtype>::load((const typename Dtype::Element*)tensor + i);
}

template <class Dtype>
FW_INLINE void store(void* tensor, int64_t i, Floats x) {
    Access<Dtype>::store((typename Dtype::Element*)tensor + i, x);
}

/* The first `count` < kLanes elements; the other lanes are `fill` and not touched in memory. */
template <class Dtype>
FW_INLINE Floats load_some(const void* tensor, int64_t i, int64_t count, float fill) {
    typename Dtype::Element buffer[kLanes] = {};
    count &= kLanes - 1; /* says to the compiler that it is less */
    memcpy(buffer, (const typename Dtype::Element*)tensor + i, count * sizeof buffer[0]);
    Floats x = Access<Dtype>::load(buffer);
    for (int64_t k = count; k < kLanes; ++k) x[k] = fill;
    return x;
}

template <class Dtype>
FW_INLINE void store_some(void* tensor, int64_t i, int64_t count, Floats x) {
    typename Dtype::Element buffer[kLanes];
    count &= kLanes - 1;
    Access<Dtype>::store(buffer, x);
    memcpy((typename Dtype::Element*)tensor + i, buffer, count * sizeof buffer[0]);
}

/* ---- stores past the cache, for what is not read again soon: saves reading the line first */
FW_INLINE void stream(uint16_t* to, Halves h) {
#if defined(__AVX512F__)
    _mm256_stream_si256((__m256i*)to, (__m256i)h);
#elif defined(__AVX2__)
    _mm_stream_si128((__m128i*)to, (__m128i)h);
#else
    write(to, h);
#endif
}

FW_INLINE void stream(float* to, Floats x) {
#if defined(__AVX512F__)
    _mm512_stream_ps(to, (__m512)x);
#elif defined(__AVX2__)
    _mm256_stream_ps(to, (__m256)x);
#else
    write(to, x);
#endif
}

FW_INLINE void end_of_streaming() {
#if defined(__AVX2__)
    _mm_sfence();
#endif
}

/* How many elements to go until `to` can be streamed to, or all of them if it never can. */
template <class Element>
FW_INLINE int64_t until_streamable(const Element* to, int64_t n) {
    const uint64_t vector_bytes = kLanes * sizeof(Element), address = (uint64_t)to;
    if (address % sizeof(Element) != 0) return n;
    const int64_t elements = (int64_t)((vector_bytes - address % vector_bytes) % vector_bytes / sizeof(Element));
    return elements < n ? elements : n;
}

FW_INLINE float sum_of_lanes(Floats x) {
    float sum = 0;
    for (int k = 0; k < kLanes; ++k) sum += x[k];
    return sum;
}

FW_INLINE float largest_lane(Floats x) {
    float most = x[0];
    for (int k = 1; k < kLanes; ++k) most = x[k] > most ? x[k] : most;
    return most;
}

}  // namespace FW_ISA
#endif
