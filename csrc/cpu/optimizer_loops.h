/* One pass over a shard: gradient in, state and master updated, compute copy out.
 *
 * `update` is the loop; how the gradient, the master and the copy are stored are its template parameters, and what happens to an element is
 * a rule (AdamW, Lion, Sgd). The last few elements go through the same code in buffers of one vector, so that an element's result does
 * not depend on where in the shard it lies.
 */
#ifndef FRAMEWORK_CPU_OPTIMIZER_LOOPS_H
#define FRAMEWORK_CPU_OPTIMIZER_LOOPS_H

#include "framework_kernels.h"
#include "lanes.h"
#include "loops.h"

namespace FW_ISA {

/* ---- where the master lies */
struct WholeMaster {
    FW_INLINE void prefetch(const Shard& shard, int64_t i) { __builtin_prefetch(shard.master + i, 1); }
    FW_INLINE Floats load(const Shard& shard, int64_t i) { return read<Floats>(shard.master + i); }
    FW_INLINE void store(const Shard& shard, int64_t i, Floats p) { write(shard.master + i, p); }
};

/* The bits of the bf16 copy in the low halves: nearest, ties away from zero. The same wherever the rest of the master is kept, so that
 * keeping it elsewhere, or not at all, changes no copy; ties to even would leave a remainder of +32768, which does not fit. */
FW_INLINE Bits bits_of(Floats p) { return p != p ? Bits{} + 0x7fc00000u : (Bits)p; }
FW_INLINE Bits copy_of(Bits bits) { return (bits + 0x8000u) >> 16; }
FW_INLINE Halves rounded_copy(Floats p) { return narrow(copy_of(bits_of(p))); }

FW_INLINE Floats join(Halves copy, Halves remainder) {
    const Bits low = (Bits)((Ints)(widen(remainder) << 16) >> 16); /* sign-extended */
    return (Floats)((widen(copy) << 16) + low);
}

struct SplitMaster {
    FW_INLINE void prefetch(const Shard& shard, int64_t i) {
        __builtin_prefetch((uint16_t*)shard.copy + i, 1);
        __builtin_prefetch(shard.remainder + i, 1);
    }
    FW_INLINE Floats load(const Shard& shard, int64_t i) {
        return join(read<Halves>((const uint16_t*)shard.copy + i), read<Halves>(shard.remainder + i));
    }
    FW_INLINE void store(const Shard& shard, int64_t i, Floats p) {
        const Bits bits = bits_of(p), copy = copy_of(bits); /* the remainder is within [-32768, 32767] */
        write((uint16_t*)shard.copy + i, narrow(copy));
        write(shard.remainder + i, narrow((bits - (copy << 16)) & 0xffffu));
    }
};

/* The bf16 parameter itself: what it is rounded by is lost. */
struct NoMaster {
    FW_INLINE void prefetch(const Shard& shard, int64_t i) { __builtin_prefetch((uint16_t*)shard.copy + i, 1); }
    FW_INLINE Floats load(const Shard& shard, int64_t i) { return (Floats)(widen(read<Halves>((const uint16_t*)shard.copy + i)) << 16); }
    FW_INLINE void store(const Shard& shard, int64_t i, Floats p) { write((uint16_t*)shard.copy + i, rounded_copy(p)); }
};

/* ---- which copy is written besides */
struct NoCopy {
    FW_INLINE void store(const Shard&, int64_t, Floats) {}
};
template <class Dtype>
struct Copy {
    FW_INLINE void store(const Shard& shard, int64_t i, Floats p) { FW_ISA::store<Dtype>(shard.copy, i, p); }
};
template <>
struct Copy<BF16> {
    FW_INLINE void store(const Shard& shard, int64_t i, Floats p) { write((uint16_t*)shard.copy + i, rounded_copy(p)); }
};
struct StreamedCopy { /* bf16 */
    FW_INLINE void store(const Shard& shard, int64_t i, Floats p) { stream((uint16_t*)shard.copy + i, rounded_copy(p)); }
};

/* Dtypes that are looked up for every vector: well predicted, a few percent slower, and one loop in place of nine. */
struct AnyGrad {
    FW_INLINE Floats load(const Shard& shard, int64_t i) {
        if (shard.grad_dtype == FW_F32) return FW_ISA::load<F32>(shard.grad, i);
        if (shard.grad_dtype == FW_BF16) return FW_ISA::load<BF16>(shard.grad, i);
        return FW_ISA::load<F16>(shard.grad, i);
    }
};
template <class Dtype>
struct Grad {
    FW_INLINE Floats load(const Shard& shard, int64_t i) { return FW_ISA::load<Dtype>(shard.grad, i); }
};
struct AnyCopy {
    FW_INLINE void store(const Shard& shard, int64_t i, Floats p) {
        if (!shard.copy) return;
        if (shard.copy_dtype == FW_F32) return Copy<F32>::store(shard, i, p);
        if (shard.copy_dtype == FW_BF16) return Copy<BF16>::store(shard, i, p);
        Copy<F16>::store(shard, i, p);
    }
};

/* ---- what happens to kLanes elements */
struct AdamWRule {
    static constexpr int kStates = 2;
    static constexpr int kVectors = 4; /* in one round of the loop */
    const Floats beta2, one_minus_beta1, one_minus_beta2, eps, decay, step, inverse_bias_correction2;
    explicit AdamWRule(const AdamWSettings& s)
        : beta2(all(s.beta2)), one_minus_beta1(all(s.one_minus_beta1)), one_minus_beta2(all(s.one_minus_beta2)), eps(all(s.eps)),
          decay(all(s.decay)), step(all(s.step)), inverse_bias_correction2(all(s.inverse_bias_correction2)) {}
    FW_INLINE Floats apply(const AdamWRule& r, Floats p, Floats g, Floats* state) {
        const Floats m = state[0] + r.one_minus_beta1 * (g - state[0]);
        const Floats v = r.beta2 * state[1] + r.one_minus_beta2 * g * g;
        state[0] = m;
        state[1] = v;
        return p * r.decay - r.step * m / (square_root(v) * r.inverse_bias_correction2 + r.eps);
    }
};

struct LionRule {
    static constexpr int kStates = 1, kVectors = 1;
    const Floats beta1, one_minus_beta1, beta2, one_minus_beta2, decay, lr;
    explicit LionRule(const LionSettings& s)
        : beta1(all(s.beta1)), one_minus_beta1(all(s.one_minus_beta1)), beta2(all(s.beta2)), one_minus_beta2(all(s.one_minus_beta2)),
          decay(all(s.decay)), lr(all(s.lr)) {}
    FW_INLINE Floats apply(const LionRule& r, Floats p, Floats g, Floats* state) {
        const Floats direction = r.beta1 * state[0] + r.one_minus_beta1 * g;
        state[0] = r.beta2 * state[0] + r.one_minus_beta2 * g;
        const Floats change = direction > 0.f ? r.lr : (direction < 0.f ? -r.lr : Floats{});
        return p * r.decay - change;
    }
};

struct SgdRule {
    static constexpr int kStates = 0, kVectors = 1;
    const Floats weight_decay, lr;
    explicit SgdRule(const SgdSettings& s) : weight_decay(all(s.weight_decay)), lr(all(s.lr)) {}
    FW_INLINE Floats apply(const SgdRule& r, Floats p, Floats g, Floats*) { return p - r.lr * (g + r.weight_decay * p); }
};

struct MomentumRule {
    static constexpr int kStates = 1, kVectors = 1;
    const Floats momentum, one_minus_dampening, weight_decay, lr, ahead;
    const bool first_step, nesterov;
    explicit MomentumRule(const SgdSettings& s)
        : momentum(all(s.momentum)), one_minus_dampening(all(s.one_minus_dampening)), weight_decay(all(s.weight_decay)), lr(all(s.lr)),
          ahead(all(s.momentum)), first_step(s.first_step), nesterov(s.nesterov) {}
    FW_INLINE Floats apply(const MomentumRule& r, Floats p, Floats g, Floats* state) {
        g += r.weight_decay * p;
        state[0] = r.first_step ? g : r.momentum * state[0] + r.one_minus_dampening * g;
        return p - r.lr * (r.nesterov ? g + r.momentum * state[0] : state[0]);
    }
};

/* ---- the loop */
/* A shard has more streams than the processor prefetches by itself, and it stops at the end of every page: every round asks for what it
 * will need so many elements later. A prefetch past the end of a tensor is ignored. */
constexpr int64_t kAhead = 512;
constexpr int64_t kLineElements = 16; /* fp32 values of a cache line */

template <class Master, class Rule>
FW_INLINE void prefetch_round(const Shard& shard, int64_t i, int64_t count) {
    const int64_t grad_bytes = shard.grad_dtype == FW_F32 ? 4 : 2;
    for (int64_t at = i + kAhead; at < i + kAhead + count; at += kLineElements) {
        Master::prefetch(shard, at);
        for (int k = 0; k < Rule::kStates; ++k) __builtin_prefetch(shard.state[k] + at, 1);
        __builtin_prefetch((const char*)shard.grad + at * grad_bytes, 0);
    }
}

template <class GradIn, class Master, class CopyOut, class Rule>
FW_INLINE void update_vector(const Shard& shard, const Rule& rule, Floats grad_factor, int64_t i) {
    Floats state[2];
    for (int k = 0; k < Rule::kStates; ++k) state[k] = read<Floats>(shard.state[k] + i);
    const Floats g = GradIn::load(shard, i) * grad_factor;
    const Floats p = Rule::apply(rule, Master::load(shard, i), g, state);
    for (int k = 0; k < Rule::kStates; ++k) write(shard.state[k] + i, state[k]);
    Master::store(shard, i, p);
    CopyOut::store(shard, i, p);
}

/* `one_vector` is update_vector; handed over as a pointer, so that there is one update_some for each rule only. */
template <class Rule>
static void update_some(const Shard& shard, const Rule& rule, float factor, int64_t i, int64_t count,
                        void (*one_vector)(const Shard&, const Rule&, float)) {
    alignas(64) char master[kLanes * 4] = {}, states[2][kLanes * 4] = {}, grad[kLanes * 4] = {}, copy[kLanes * 4] = {};
    alignas(64) char remainder[kLanes * 2] = {};
    struct Piece {
        char* buffer;
        void* tensor;
        int64_t element_bytes;
    };
    const int64_t grad_bytes = shard.grad_dtype == FW_F32 ? 4 : 2, copy_bytes = shard.copy_dtype == FW_F32 ? 4 : 2;
    const Piece pieces[] = {{master, shard.master, 4},         {states[0], shard.state[0], 4}, {states[1], shard.state[1], 4},
                            {remainder, shard.remainder, 2}, {copy, shard.copy, copy_bytes}, {grad, (void*)shard.grad, grad_bytes}};
    for (const Piece& piece : pieces)
        if (piece.tensor) memcpy(piece.buffer, (char*)piece.tensor + i * piece.element_bytes, count * piece.element_bytes);
    Shard buffers = shard;
    buffers.master = (float*)master;
    buffers.remainder = (uint16_t*)remainder;
    buffers.state[0] = (float*)states[0];
    buffers.state[1] = (float*)states[1];
    buffers.grad = grad;
    buffers.copy = copy;
    one_vector(buffers, rule, factor);
    for (const Piece& piece : pieces)
        if (piece.tensor && piece.tensor != shard.grad) memcpy((char*)piece.tensor + i * piece.element_bytes, piece.buffer, count * piece.element_bytes);
}

template <class GradIn, class Master, class CopyOut, class Rule>
static void update(const Shard& shared_shard, const Rule& shared_rule, float factor, int64_t start, int64_t stop) {
    const Shard shard = shared_shard; /* locals that nothing points to, so that their members stay in registers */
    const Rule rule = shared_rule;
    const Floats grad_factor = all(factor);
    int64_t i = start;
    if constexpr (Rule::kVectors > 1) {
        constexpr int64_t kStep = Rule::kVectors * kLanes;
        for (; i + kStep <= stop; i += kStep) {
            prefetch_round<Master, Rule>(shard, i, kStep);
#pragma GCC unroll 8
            for (int k = 0; k < Rule::kVectors; ++k) update_vector<GradIn, Master, CopyOut>(shard, rule, grad_factor, i + k * kLanes);
        }
    }
    for (; i + kLanes <= stop; i += kLanes) update_vector<GradIn, Master, CopyOut>(shard, rule, grad_factor, i);
    if (i < stop) {
        update_some<Rule>(shard, rule, factor, i, stop - i, [](const Shard& one, const Rule& by, float times) {
            update_vector<GradIn, Master, CopyOut>(one, by, all(times), 0);
        });
    }
}

template <class GradIn, class Rule>
static void update_and_copy_bf16(const Shard& shard, const Rule& rule, float factor, int64_t start, int64_t stop) {
    if (!shard.stream_copy) return update<GradIn, WholeMaster, Copy<BF16>>(shard, rule, factor, start, stop);
    const int64_t aligned = start + until_streamable((const uint16_t*)shard.copy + start, stop - start);
    const int64_t whole = aligned + (stop - aligned) / kLanes * kLanes;
    update<GradIn, WholeMaster, Copy<BF16>>(shard, rule, factor, start, aligned);
    update<GradIn, WholeMaster, StreamedCopy>(shard, rule, factor, aligned, whole);
    end_of_streaming();
    update<GradIn, WholeMaster, Copy<BF16>>(shard, rule, factor, whole, stop);
}

/* For the dtypes of mixed-precision training a loop each, for others one with dtypes looked up in it. */
template <class GradIn, class Rule>
static void update_fast(const Shard& shard, const Rule& rule, float factor, int64_t start, int64_t stop) {
    if (shard.remainder) return update<GradIn, SplitMaster, NoCopy>(shard, rule, factor, start, stop);
    if (!shard.master) return update<GradIn, NoMaster, NoCopy>(shard, rule, factor, start, stop);
    if (!shard.copy) return update<GradIn, WholeMaster, NoCopy>(shard, rule, factor, start, stop);
    if (shard.copy_dtype == FW_BF16) return update_and_copy_bf16<GradIn>(shard, rule, factor, start, stop);
    update<GradIn, WholeMaster, AnyCopy>(shard, rule, factor, start, stop);
}

static void adamw(const Shard& shard, const AdamWSettings& settings, int64_t start, int64_t stop) {
    const AdamWRule rule(settings);
    if (shard.grad_dtype == FW_F32) return update_fast<Grad<F32>>(shard, rule, settings.grad_factor, start, stop);
    if (shard.grad_dtype == FW_BF16) return update_fast<Grad<BF16>>(shard, rule, settings.grad_factor, start, stop);
    update_fast<Grad<F16>>(shard, rule, settings.grad_factor, start, stop);
}

template <class Rule, class Settings>
static void update_any(const Shard& shard, const Settings& settings, int64_t start, int64_t stop) {
    const Rule rule(settings);
    if (shard.remainder) return update<AnyGrad, SplitMaster, NoCopy>(shard, rule, settings.grad_factor, start, stop);
    if (!shard.master) return update<AnyGrad, NoMaster, NoCopy>(shard, rule, settings.grad_factor, start, stop);
    update<AnyGrad, WholeMaster, AnyCopy>(shard, rule, settings.grad_factor, start, stop);
}

static void lion(const Shard& shard, const LionSettings& settings, int64_t start, int64_t stop) {
    update_any<LionRule>(shard, settings, start, stop);
}

static void sgd(const Shard& shard, const SgdSettings& settings, int64_t start, int64_t stop) {
    if (shard.state[0]) return update_any<MomentumRule>(shard, settings, start, stop);
    update_any<SgdRule>(shard, settings, start, stop);
}

static void join_master(const uint16_t* copy, const uint16_t* remainder, int64_t start, int64_t stop, float* out) {
    int64_t i = start;
    for (; i + kLanes <= stop; i += kLanes) write(out + (i - start), join(read<Halves>(copy + i), read<Halves>(remainder + i)));
    for (; i < stop; ++i) {
        const uint32_t bits = ((uint32_t)copy[i] << 16) + (uint32_t)(int32_t)(int16_t)remainder[i];
        memcpy(out + (i - start), &bits, 4);
    }
}

/* The traffic of AdamW with next to nothing computed, for measurements: fp32 gradient and no copy, or bf16 gradient and copy. */
struct MoveRule {
    static constexpr int kStates = 2, kVectors = 1;
    FW_INLINE Floats apply(const MoveRule&, Floats p, Floats g, Floats* state) {
        state[0] += g; /* the gradient was multiplied by 0; without an addition the compiler would leave the stores out */
        state[1] += g;
        return p + g;
    }
};

static void move(const Shard& shard, int64_t start, int64_t stop) {
    if (shard.grad_dtype == FW_F32) return update<Grad<F32>, WholeMaster, NoCopy>(shard, MoveRule{}, 0.f, start, stop);
    update_and_copy_bf16<Grad<BF16>>(shard, MoveRule{}, 0.f, start, stop);
}

}  // namespace FW_ISA
#endif
