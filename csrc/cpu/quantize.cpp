/* fw_quantize and its relatives: checks arguments and splits whole blocks over threads. */
#include "framework_kernels.h"
#include "loops.h"
#include "threads.h"

namespace {

constexpr int64_t kLeastPerThread = 16384;
constexpr int64_t kSumElements = FW_LARGEST_FUSED_BLOCK; /* fp32 sums on the stack */

bool known(int dtype) { return dtype == FW_F32 || dtype == FW_BF16 || dtype == FW_F16; }

bool valid(int bits, int block, int64_t n) { return n >= 0 && block > 0 && (bits == 8 || (bits == 4 && block % 2 == 0)); }

int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

struct Sums {
    const Loops& loops;
    const void* q;
    const float* scales;
    int64_t parts, n, bytes, blocks;
    QuantFormat format;

    void add_up(int64_t start, int64_t stop, float* sum) const {
        for (int64_t part = 0; part < parts; ++part)
            for (int64_t at = start; at < stop;) {
                const int64_t block = at / format.block, end = smaller((block + 1) * format.block, stop);
                loops.add_dequantized((const char*)q + part * bytes, scales[part * blocks + block], format.bits, sum + (at - start), part == 0, at,
                                      end);
                at = end;
            }
    }
};

}  // namespace

extern "C" {

int fw_quantize(const void* x, int dtype, int64_t n, int bits, int block, void* q, float* scales, float* error, void*) {
    if (!known(dtype) || !valid(bits, block, n)) return FW_INVALID;
    const Loops& loops = chosen_loops();
    split(n, block, kLeastPerThread, Denormals::kFlush, [&](int64_t begin, int64_t end) {
        loops.quantize(x, dtype, error, {bits, block}, q, scales, begin, end);
    });
    return 0;
}

int fw_dequantize(const void* q, int bits, const float* scales, int64_t n, int block, void* out, int dtype, int add, void*) {
    if (!known(dtype) || !valid(bits, block, n)) return FW_INVALID;
    const Loops& loops = chosen_loops();
    split(n, block, kLeastPerThread, Denormals::kFlush, [&](int64_t begin, int64_t end) {
        loops.dequantize(q, scales, {bits, block}, out, dtype, add != 0, begin, end);
    });
    return 0;
}

int fw_dequantize_sum_quantize(const void* q, const float* scales, int64_t parts, int64_t n, int bits, int block, void* q_out,
                               float* scales_out, void* sum_out, int sum_dtype, void*) {
    if (!valid(bits, block, n) || parts < 1 || (q_out == nullptr) != (scales_out == nullptr)) return FW_INVALID;
    if ((sum_out && !known(sum_dtype)) || (q_out && block > kSumElements)) return FW_INVALID;
    const Loops& loops = chosen_loops();
    const int64_t bytes = bits == 8 ? n : (n + 1) / 2, blocks = (n + block - 1) / block;
    const Sums sums = {loops, q, scales, parts, n, bytes, blocks, {bits, block}};
    const int64_t step = block > kSumElements ? kSumElements : kSumElements / block * block;
    split(n, block, kLeastPerThread, Denormals::kFlush, [&](int64_t begin, int64_t end) {
        alignas(64) float sum[kSumElements];
        for (int64_t at = begin; at < end; at += step) {
            const int64_t count = smaller(step, end - at);
            sums.add_up(at, at + count, sum);
            if (q_out) {
                char* const to = (char*)q_out + (bits == 8 ? at : at / 2);
                loops.quantize(sum, FW_F32, nullptr, {bits, block}, to, scales_out + at / block, 0, count);
            }
            if (sum_out) loops.cast(sum, FW_F32, (char*)sum_out + at * (sum_dtype == FW_F32 ? 4 : 2), sum_dtype, 0, count, false);
        }
    });
    return 0;
}

int fw_nf4_dequantize(const uint8_t* q, const float* absmax, int64_t n, int block, void* out, int dtype, void*) {
    if (!known(dtype) || !valid(4, block, n)) return FW_INVALID;
    const Loops& loops = chosen_loops();
    split(n, block, kLeastPerThread, Denormals::kFlush,
          [&](int64_t begin, int64_t end) { loops.nf4_dequantize(q, absmax, block, out, dtype, begin, end); });
    return 0;
}

}  // extern "C"
