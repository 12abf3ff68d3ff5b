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
    FW_INLINE Floats load(const Shard& shard, int64_t i) { return read<Floats>(shard.master + i); }
    FW_INLINE void store(const Shard& shard, int64_t i, Floats p) { write(shard.master + i, p); }
};

FW_INLINE Floats join(Halves copy, Halves remainder) {
    const Bits low = (Bits)((Ints)(widen(remainder) << 16) >> 16); /* sign-extended */
    return (Floats)((widen(copy) << 16) + low);
}

struct SplitMaster {
    FW_INLINE Floats load(const Shard& shard, int64_t i) {
        return join(read<Halves>((const uint16_t*)shard.copy + i), read<Halves>(shard.remainder + i));
    }
    FW_INLINE void store(const Shard& shard, int64_t i, Floats p) {
        const Bits bits = p != p ? Bits{} + 0x7fc00000u : (Bits)p;
        const Bits copy = (bits + 0x8000u) >> 16; /* ties away from zero: the remainder is within [-32768, 32767] */
        write((uint16_t*)shard.copy + i, narrow(copy));
        write(shard.remainder + i, narrow((bits - (copy << 16)) & 0xffffu));
    }
};

/* ---- which copy is written besides */
struct NoCopy {
    static constexpr int64_t kBytes = 0;
    FW_INLINE void store(void*, int64_t, Floats) {}
};
template <class Dtype>
struct Copy {
    static constexpr int64_t kBytes = sizeof(typename Dtype::Element);
    FW_INLINE void store(void* copy, int64_t i, Floats p) { FW_ISA::store<Dtype>(copy, i, p); }
};
template <class Dtype>
struct StreamedCopy { /* 16-bit dtypes */
    static constexpr int64_t kBytes = 2;
    FW_INLINE void store(void* copy, int64_t i, Floats p) { stream((uint16_t*)copy + i, Access<Dtype>::round(p)); }
};

/* ---- what happens to kLanes elements */
struct AdamWRule {
    static constexpr int kStates = 2;
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
    static constexpr int kStates = 1;
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
    static constexpr int kStates = 0;
    const Floats weight_decay, lr;
    explicit SgdRule(const SgdSettings& s) : weight_decay(all(s.weight_decay)), lr(all(s.lr)) {}
    FW_INLINE Floats apply(const SgdRule& r, Floats p, Floats g, Floats*) { return p - r.lr * (g + r.weight_decay * p); }
};

struct MomentumRule {
    static constexpr int kStates = 1;
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
template <class Grad, class Master, class CopyOut, class Rule>
FW_INLINE void update_vector(const Shard& shard, const Rule& rule, Floats grad_factor, int64_t i) {
    Floats state[2];
    for (int k = 0; k < Rule::kStates; ++k) state[k] = read<Floats>(shard.state[k] + i);
    const Floats g = load<Grad>(shard.grad, i) * grad_factor;
    const Floats p = Rule::apply(rule, Master::load(shard, i), g, state);
    for (int k = 0; k < Rule::kStates; ++k) write(shard.state[k] + i, state[k]);
    Master::store(shard, i, p);
    CopyOut::store(shard.copy, i, p);
}

template <class Grad, class Master, class CopyOut, class Rule>
static void update_some(const Shard& shard, const Rule& rule, Floats grad_factor, int64_t i, int64_t count) {
    alignas(64) float master[kLanes] = {}, states[2][kLanes] = {};
    alignas(64) uint32_t copy[kLanes] = {}; /* large enough for any dtype */
    alignas(64) uint16_t remainder[kLanes] = {};
    alignas(64) typename Grad::Element grad[kLanes] = {};
    const int64_t copy_bytes = shard.remainder ? 2 : CopyOut::kBytes;
    char* const copy_at = (char*)shard.copy + i * copy_bytes;
    memcpy(grad, (const typename Grad::Element*)shard.grad + i, count * sizeof grad[0]);
    for (int k = 0; k < Rule::kStates; ++k) memcpy(states[k], shard.state[k] + i, count * 4);
    if (shard.master) memcpy(master, shard.master + i, count * 4);
    if (shard.remainder) {
        memcpy(remainder, shard.remainder + i, count * 2);
        memcpy(copy, copy_at, count * 2);
    }
    Shard buffers = shard;
    buffers.master = master;
    buffers.remainder = remainder;
    buffers.state[0] = states[0];
    buffers.state[1] = states[1];
    buffers.grad = grad;
    buffers.copy = copy;
    update_vector<Grad, Master, CopyOut>(buffers, rule, grad_factor, 0);
    for (int k = 0; k < Rule::kStates; ++k) memcpy(shard.state[k] + i, states[k], count * 4);
    if (shard.master) memcpy(shard.master + i, master, count * 4);
    if (shard.remainder) memcpy(shard.remainder + i, remainder, count * 2);
    if (copy_bytes) memcpy(copy_at, copy, count * copy_bytes);
}

template <class Grad, class Master, class CopyOut, class Rule>
static void update(const Shard& shared_shard, const Rule& shared_rule, float factor, int64_t start, int64_t stop) {
    const Shard shard = shared_shard; /* locals that nothing points to, so that their members stay in registers */
    const Rule rule = shared_rule;
    const Floats grad_factor = all(factor);
    int64_t i = start;
    for (; i + 4 * kLanes <= stop; i += 4 * kLanes) {
#pragma GCC unroll 4
        for (int k = 0; k < 4; ++k) update_vector<Grad, Master, CopyOut>(shard, rule, grad_factor, i + k * kLanes);
    }
    for (; i + kLanes <= stop; i += kLanes) update_vector<Grad, Master, CopyOut>(shard, rule, grad_factor, i);
    if (i < stop) update_some<Grad, Master, CopyOut>(shard, rule, grad_factor, i, stop - i);
}

template <class Grad, class Dtype, class Rule>
static void update_and_copy(const Shard& shard, const Rule& rule, float factor, int64_t start, int64_t stop) {
    if (!shard.stream_copy) return update<Grad, WholeMaster, Copy<Dtype>>(shard, rule, factor, start, stop);
    const int64_t aligned = start + until_streamable((const uint16_t*)shard.copy + start, stop - start);
    update<Grad, WholeMaster, Copy<Dtype>>(shard, rule, factor, start, aligned);
    const int64_t whole = aligned + (stop - aligned) / kLanes * kLanes;
    update<Grad, WholeMaster, StreamedCopy<Dtype>>(shard, rule, factor, aligned, whole);
    end_of_streaming();
    update<Grad, WholeMaster, Copy<Dtype>>(shard, rule, factor, whole, stop);
}

template <class Grad, class Rule>
static void update_from(const Shard& shard, const Rule& rule, float factor, int64_t start, int64_t stop) {
    if (shard.remainder) return update<Grad, SplitMaster, NoCopy>(shard, rule, factor, start, stop);
    if (!shard.copy) return update<Grad, WholeMaster, NoCopy>(shard, rule, factor, start, stop);
    if (shard.copy_dtype == FW_F32) return update<Grad, WholeMaster, Copy<F32>>(shard, rule, factor, start, stop);
    if (shard.copy_dtype == FW_BF16) return update_and_copy<Grad, BF16>(shard, rule, factor, start, stop);
    update_and_copy<Grad, F16>(shard, rule, factor, start, stop);
}

template <class Rule, class Settings>
static void update_by(const Shard& shard, const Settings& settings, int64_t start, int64_t stop) {
    const Rule rule(settings);
    if (shard.grad_dtype == FW_F32) return update_from<F32>(shard, rule, settings.grad_factor, start, stop);
    if (shard.grad_dtype == FW_BF16) return update_from<BF16>(shard, rule, settings.grad_factor, start, stop);
    update_from<F16>(shard, rule, settings.grad_factor, start, stop);
}

static void adamw(const Shard& shard, const AdamWSettings& settings, int64_t start, int64_t stop) {
    update_by<AdamWRule>(shard, settings, start, stop);
}

static void lion(const Shard& shard, const LionSettings& settings, int64_t start, int64_t stop) {
    update_by<LionRule>(shard, settings, start, stop);
}

static void sgd(const Shard& shard, const SgdSettings& settings, int64_t start, int64_t stop) {
    if (shard.state[0]) return update_by<MomentumRule>(shard, settings, start, stop);
    update_by<SgdRule>(shard, settings, start, stop);
}

static void join_master(const uint16_t* copy, const uint16_t* remainder, int64_t start, int64_t stop, float* out) {
    int64_t i = start;
    for (; i + kLanes <= stop; i += kLanes) write(out + (i - start), join(read<Halves>(copy + i), read<Halves>(remainder + i)));
    for (; i < stop; ++i) {
        const uint32_t bits = ((uint32_t)copy[i] << 16) + (uint32_t)(int32_t)(int16_t)remainder[i];
        memcpy(out + (i - start), &bits, 4);
    }
}

/* The traffic of AdamW with nothing computed, for measurements. */
struct MoveRule {
    static constexpr int kStates = 2;
    FW_INLINE Floats apply(const MoveRule&, Floats p, Floats g, Floats* state) {
        state[0] += g; /* the gradient was multiplied by 0; without an addition the compiler would leave the stores out */
        state[1] += g;
        return p + g;
    }
};

static void move(const Shard& shard, int64_t start, int64_t stop) {
    if (shard.grad_dtype == FW_F32) return update_from<F32>(shard, MoveRule{}, 0.f, start, stop);
    if (shard.grad_dtype == FW_BF16) return update_from<BF16>(shard, MoveRule{}, 0.f, start, stop);
    update_from<F16>(shard, MoveRule{}, 0.f, start, stop);
}

}  // namespace FW_ISA
#endif
