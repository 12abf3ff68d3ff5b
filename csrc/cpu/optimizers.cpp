/* fw_adamw, fw_lion, fw_sgd: checks arguments, splits the shard over threads, and quantises what was just updated while it is in the cache. */
#include <math.h>

#include "framework_kernels.h"
#include "loops.h"
#include "threads.h"

namespace {

constexpr int64_t kLeastPerThread = 16384;
constexpr int64_t kTile = FW_LARGEST_FUSED_BLOCK; /* elements between updating and quantising: 64 KiB of moments, master and gradient */
constexpr int64_t kStreamFromElements = 1 << 20;  /* a copy that would push the state out of the cache is written past it */

bool known(int dtype) { return dtype == FW_F32 || dtype == FW_BF16 || dtype == FW_F16; }

bool ascending(const fw_range* ranges, int64_t n_ranges) {
    int64_t last = 0;
    for (int64_t r = 0; r < n_ranges; ++r) {
        if (ranges[r].start < last || ranges[r].stop < ranges[r].start) return false;
        last = ranges[r].stop;
    }
    return true;
}

bool is_empty(const fw_range* ranges, int64_t n_ranges) {
    for (int64_t r = 0; r < n_ranges; ++r)
        if (ranges[r].start != ranges[r].stop) return false;
    return n_ranges >= 0;
}

bool wants_quantized(const fw_copies* copies) { return copies && copies->quantized; }

bool valid(const Shard& shard, const fw_copies* copies, const fw_range* ranges, int64_t n_ranges) {
    if (n_ranges < 0 || (n_ranges > 0 && !ranges) || !ascending(ranges, n_ranges)) return false;
    if (!known(shard.grad_dtype) || (shard.copy && !known(shard.copy_dtype))) return false;
    if (shard.master && shard.remainder) return false;
    if (!shard.master && (!shard.copy || shard.copy_dtype != FW_BF16)) return false;
    if (!wants_quantized(copies)) return true;
    if (!shard.master && !shard.remainder) return false;
    const bool whole_bytes = copies->bits == 8 || (copies->bits == 4 && copies->block % 2 == 0);
    return copies->scales && copies->block > 0 && copies->block <= FW_LARGEST_FUSED_BLOCK && whole_bytes;
}

Shard shard_of(float* master, uint16_t* remainder, float* state0, float* state1, const void* grad, int grad_dtype, const fw_copies* copies,
               const fw_range* ranges, int64_t n_ranges) {
    Shard shard = {master, remainder, {state0, state1}, grad, grad_dtype, nullptr, FW_F32, false};
    if (copies) shard.copy = copies->data, shard.copy_dtype = copies->dtype;
    int64_t elements = 0;
    for (int64_t r = 0; r < n_ranges; ++r) elements += ranges[r].stop - ranges[r].start;
    shard.stream_copy = elements >= kStreamFromElements;
    return shard;
}

/* The blocks within [begin, end) that hold an element of a range. `begin` is the first element of a block. */
void quantize_touched(const Loops& loops, const Shard& shard, const fw_copies& copies, const fw_range* ranges, int64_t n_ranges, int64_t begin,
                      int64_t end) {
    const QuantFormat format = {copies.bits, copies.block};
    for (int64_t r = 0; r < n_ranges; ++r) {
        int64_t start = ranges[r].start > begin ? ranges[r].start : begin;
        int64_t stop = ranges[r].stop < end ? ranges[r].stop : end;
        if (start >= stop) continue;
        start = start / copies.block * copies.block;
        stop = (stop + copies.block - 1) / copies.block * copies.block;
        if (stop > end) stop = end;
        begin = stop; /* blocks that two ranges share are written once */
        if (shard.master) {
            loops.quantize(shard.master, FW_F32, nullptr, format, copies.quantized, copies.scales, start, stop);
            continue;
        }
        float whole[kTile];
        const int64_t step = kTile / copies.block * copies.block;
        for (int64_t i = start; i < stop; i += step) {
            const int64_t count = (stop - i < step ? stop - i : step);
            loops.join_master((const uint16_t*)shard.copy, shard.remainder, i, i + count, whole);
            char* const q = (char*)copies.quantized + (copies.bits == 8 ? i : i / 2);
            loops.quantize(whole, FW_F32, nullptr, format, q, copies.scales + i / copies.block, 0, count);
        }
    }
}

/* update_range(range, start, stop) for what each thread has of each range */
template <class UpdateRange>
void run(const Shard& shard, const fw_copies* copies, const fw_range* ranges, int64_t n_ranges, const UpdateRange& update_range) {
    if (n_ranges == 0) return;
    const Loops& loops = chosen_loops();
    const int64_t block = wants_quantized(copies) ? copies->block : 1;
    const int64_t grain = block * (block >= 64 ? 1 : (64 + block - 1) / block);
    const int64_t tile = wants_quantized(copies) ? grain * (grain >= kTile ? 1 : kTile / grain) : INT64_MAX;
    const int64_t first = ranges[0].start / grain * grain, end_of_shard = ranges[n_ranges - 1].stop;
    split(end_of_shard - first, grain, kLeastPerThread, Denormals::kFlush, [&](int64_t begin, int64_t end) {
        for (int64_t at = first + begin; at < first + end;) {
            const int64_t tile_end = tile < first + end - at ? at + tile : first + end;
            for (int64_t r = 0; r < n_ranges; ++r) {
                const int64_t start = ranges[r].start > at ? ranges[r].start : at;
                const int64_t stop = ranges[r].stop < tile_end ? ranges[r].stop : tile_end;
                if (start < stop) update_range(loops, ranges[r], start, stop);
            }
            if (wants_quantized(copies)) quantize_touched(loops, shard, *copies, ranges, n_ranges, at, tile_end);
            at = tile_end;
        }
    });
}

}  // namespace

extern "C" {

int fw_adamw(float* master, uint16_t* remainder, float* exp_avg, float* exp_avg_sq, const void* grad, int grad_dtype, const fw_copies* copies,
             const fw_range* ranges, int64_t n_ranges, double beta1, double beta2, double eps, const float* grad_factor, void*) {
    if (is_empty(ranges, n_ranges)) return 0;
    const Shard shard = shard_of(master, remainder, exp_avg, exp_avg_sq, grad, grad_dtype, copies, ranges, n_ranges);
    if (!valid(shard, copies, ranges, n_ranges)) return FW_INVALID;
    const float factor = grad_factor ? *grad_factor : 1.f;
    if (!isfinite(factor)) return 0;
    run(shard, copies, ranges, n_ranges, [&](const Loops& loops, const fw_range& range, int64_t start, int64_t stop) {
        AdamWSettings settings;
        settings.grad_factor = factor;
        settings.beta2 = (float)beta2;
        settings.one_minus_beta1 = (float)(1 - beta1);
        settings.one_minus_beta2 = (float)(1 - beta2);
        settings.eps = (float)eps;
        settings.decay = (float)(1 - (double)range.lr * range.weight_decay);
        settings.step = (float)((double)range.lr / range.bias_correction1);
        settings.inverse_bias_correction2 = (float)(1 / (double)range.bias_correction2_sqrt);
        loops.adamw(shard, settings, start, stop);
    });
    return 0;
}

int fw_lion(float* master, uint16_t* remainder, float* exp_avg, const void* grad, int grad_dtype, const fw_copies* copies,
            const fw_range* ranges, int64_t n_ranges, double beta1, double beta2, const float* grad_factor, void*) {
    if (is_empty(ranges, n_ranges)) return 0;
    const Shard shard = shard_of(master, remainder, exp_avg, nullptr, grad, grad_dtype, copies, ranges, n_ranges);
    if (!valid(shard, copies, ranges, n_ranges)) return FW_INVALID;
    const float factor = grad_factor ? *grad_factor : 1.f;
    if (!isfinite(factor)) return 0;
    run(shard, copies, ranges, n_ranges, [&](const Loops& loops, const fw_range& range, int64_t start, int64_t stop) {
        LionSettings settings;
        settings.grad_factor = factor;
        settings.beta1 = (float)beta1;
        settings.one_minus_beta1 = (float)(1 - beta1);
        settings.beta2 = (float)beta2;
        settings.one_minus_beta2 = (float)(1 - beta2);
        settings.decay = (float)(1 - (double)range.lr * range.weight_decay);
        settings.lr = range.lr;
        loops.lion(shard, settings, start, stop);
    });
    return 0;
}

int fw_sgd(float* master, uint16_t* remainder, float* momentum_buffer, const void* grad, int grad_dtype, const fw_copies* copies,
           const fw_range* ranges, int64_t n_ranges, double momentum, double dampening, int nesterov, int first_step, const float* grad_factor,
           void*) {
    if (is_empty(ranges, n_ranges)) return 0;
    const Shard shard = shard_of(master, remainder, momentum_buffer, nullptr, grad, grad_dtype, copies, ranges, n_ranges);
    if (!valid(shard, copies, ranges, n_ranges) || (!momentum_buffer && momentum != 0)) return FW_INVALID;
    const float factor = grad_factor ? *grad_factor : 1.f;
    if (!isfinite(factor)) return 0;
    run(shard, copies, ranges, n_ranges, [&](const Loops& loops, const fw_range& range, int64_t start, int64_t stop) {
        SgdSettings settings;
        settings.grad_factor = factor;
        settings.momentum = (float)momentum;
        settings.one_minus_dampening = (float)(1 - dampening);
        settings.weight_decay = range.weight_decay;
        settings.lr = range.lr;
        settings.nesterov = nesterov != 0;
        settings.first_step = first_step != 0;
        loops.sgd(shard, settings, start, stop);
    });
    return 0;
}

int fw_move_like_adamw(float* master, float* exp_avg, float* exp_avg_sq, const void* grad, int grad_dtype, const fw_copies* copies, int64_t n,
                       void*) {
    const fw_range range = {0, n, 0, 0, 1, 1};
    const Shard shard = shard_of(master, nullptr, exp_avg, exp_avg_sq, grad, grad_dtype, copies, &range, 1);
    const bool moves_fp32 = grad_dtype == FW_F32 && !shard.copy, moves_bf16 = grad_dtype == FW_BF16 && shard.copy && shard.copy_dtype == FW_BF16;
    if (!valid(shard, copies, &range, 1) || !(moves_fp32 || moves_bf16)) return FW_INVALID;
    run(shard, copies, &range, 1, [&](const Loops& loops, const fw_range&, int64_t start, int64_t stop) { loops.move(shard, start, stop); });
    return 0;
}

}  // extern "C"
