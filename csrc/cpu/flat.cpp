/* fw_square_sum and fw_cast: checks arguments and splits work over threads. */
#include "framework_kernels.h"
#include "loops.h"
#include "threads.h"

namespace {

constexpr int64_t kLeastPerThread = 65536;
constexpr int64_t kBlock = 8192;       /* elements that are added up in one go */
constexpr int64_t kMostGroups = 1024;  /* sums on the stack */
constexpr int64_t kStreamFromBytes = 4 << 20;

bool known(int dtype) { return dtype == FW_F32 || dtype == FW_BF16 || dtype == FW_F16; }

int64_t bytes_of(int dtype) { return dtype == FW_F32 ? 4 : 2; }

}  // namespace

extern "C" {

/* The order of additions depends on n only: lanes within a block, blocks within a group, groups. Threads take whole groups. */
int fw_square_sum(const void* x, int dtype, int64_t n, double* out, double*, int64_t, void*) {
    if (!known(dtype) || n < 0 || !out) return FW_INVALID;
    const Loops& loops = chosen_loops();
    const int64_t blocks = (n + kBlock - 1) / kBlock;
    const int64_t blocks_per_group = (blocks + kMostGroups - 1) / kMostGroups;
    const int64_t groups = blocks ? (blocks + blocks_per_group - 1) / blocks_per_group : 0;
    double sums[kMostGroups];
    const int64_t elements_per_group = blocks_per_group * kBlock;
    const int64_t least = elements_per_group ? (kLeastPerThread + elements_per_group - 1) / elements_per_group : 1;
    split(groups, 1, least, Denormals::kKeep, [&](int64_t begin, int64_t end) {
        for (int64_t group = begin; group < end; ++group) {
            double sum = 0;
            for (int64_t at = group * elements_per_group; at < (group + 1) * elements_per_group && at < n; at += kBlock)
                sum += loops.square_sum(x, dtype, at, at + kBlock < n ? at + kBlock : n);
            sums[group] = sum;
        }
    });
    double total = 0;
    for (int64_t group = 0; group < groups; ++group) total += sums[group];
    *out = total;
    return 0;
}

int fw_cast(const void* src, int src_dtype, void* dst, int dst_dtype, int64_t n, void*) {
    if (!known(src_dtype) || !known(dst_dtype) || n < 0) return FW_INVALID;
    const Loops& loops = chosen_loops();
    const bool stream = n * bytes_of(dst_dtype) >= kStreamFromBytes;
    split(n, 64, kLeastPerThread, Denormals::kKeep,
          [&](int64_t begin, int64_t end) { loops.cast(src, src_dtype, dst, dst_dtype, begin, end, stream); });
    return 0;
}

}  // extern "C"
