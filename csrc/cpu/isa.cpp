/* Which instruction set is used, and what the library says of itself.
 *
 * The choice is made at the first call: the best that was built and that both the processor and the operating system have. Tests choose
 * others with fw_choose_isa.
 */
#include <atomic>
#include <cstdio>
#include <cstring>

#include "framework_kernels.h"
#include "loops.h"
#include "threads.h"

#if defined(__clang__)
#define FW_COMPILER "clang " __clang_version__
#else
#define FW_TEXT_OF(x) #x
#define FW_TEXT(x) FW_TEXT_OF(x)
#define FW_COMPILER "gcc " FW_TEXT(__GNUC__) "." FW_TEXT(__GNUC_MINOR__)
#endif

namespace {

struct Isa {
    const char* name;
    const Loops* loops;
    bool (*is_there)();
};

const Isa kIsas[] = {
#if defined(FW_X86_64)
    {"avx512", &avx512::loops,
     [] {
         return (bool)(__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
                       __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("fma"));
     }},
    {"avx2", &avx2::loops, [] { return (bool)(__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")); }},
#endif
    {"baseline", &baseline::loops, [] { return true; }},
};

const Isa* best() {
#if defined(FW_X86_64)
    __builtin_cpu_init();
#endif
    for (const Isa& isa : kIsas)
        if (isa.is_there()) return &isa;
    return nullptr; /* not reached: the baseline is always there */
}

std::atomic<const Isa*> chosen{nullptr};
std::atomic<int> threads_wanted{0};

const Isa& current() {
    const Isa* isa = chosen.load(std::memory_order_acquire);
    if (!isa) chosen.store(isa = best(), std::memory_order_release);
    return *isa;
}

}  // namespace

const Loops& chosen_loops() { return *current().loops; }

int most_threads() {
    const int wanted = threads_wanted.load(std::memory_order_relaxed);
#if defined(_OPENMP)
    return wanted > 0 ? wanted : omp_get_max_threads();
#else
    (void)wanted;
    return 1;
#endif
}

extern "C" {

int fw_abi_version(void) { return FW_ABI_VERSION; }

const char* fw_describe(void) {
    static char text[160];
    std::snprintf(text, sizeof text, "cpu: %s, built with %s%s", current().name, FW_COMPILER,
#if defined(_OPENMP)
                  "");
#else
                  ", one thread (no OpenMP)");
#endif
    return text;
}

int fw_choose_isa(const char* name) {
    if (!name) return FW_INVALID;
    if (std::strcmp(name, "auto") == 0) {
        chosen.store(best(), std::memory_order_release);
        return 0;
    }
    best(); /* reads what the processor has */
    for (const Isa& isa : kIsas) {
        if (std::strcmp(name, isa.name) == 0 && isa.is_there()) {
            chosen.store(&isa, std::memory_order_release);
            return 0;
        }
    }
    return FW_INVALID;
}

int fw_set_threads(int threads) {
    if (threads < 0) return FW_INVALID;
    threads_wanted.store(threads, std::memory_order_relaxed);
    return 0;
}

}  // extern "C"
