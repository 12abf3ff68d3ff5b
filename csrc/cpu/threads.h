/* Splitting work over threads, and the processor's mode for denormals while it lasts.
 *
 * OpenMP and no pool of our own: torch uses the same runtime library, so that its threads and ours are the same and sit on the cores that were given
 * to the process. Nothing here is nested, and small work stays on the calling thread.
 */
#ifndef FRAMEWORK_CPU_THREADS_H
#define FRAMEWORK_CPU_THREADS_H

#include <stdint.h>
#if defined(_OPENMP)
#include <omp.h>
#endif
#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

/* Threads of a call: what fw_set_threads asked for, or OpenMP's default (isa.cpp). */
int most_threads();

/* While it lives, denormal inputs and results of this thread are zero. */
class FlushDenormals {
  public:
#if defined(__x86_64__)
    explicit FlushDenormals(bool wanted) : before_(_mm_getcsr()) {
        if (wanted) _mm_setcsr(before_ | 0x8040); /* FTZ | DAZ */
    }
    ~FlushDenormals() { _mm_setcsr(before_); }

  private:
    unsigned before_;
#elif defined(__aarch64__)
    explicit FlushDenormals(bool wanted) {
        __asm__ volatile("mrs %0, fpcr" : "=r"(before_));
        if (wanted) __asm__ volatile("msr fpcr, %0" : : "r"(before_ | (1ull << 24)));
    }
    ~FlushDenormals() { __asm__ volatile("msr fpcr, %0" : : "r"(before_)); }

  private:
    uint64_t before_;
#else
    explicit FlushDenormals(bool) {}
#endif
};

enum class Denormals { kFlush, kKeep };

/* Calls work(begin, end) for parts that together are [0, n). Every begin is a multiple of `grain`; a part has at least `least` (save the
 * last, or when n is smaller). */
template <class Work>
void split(int64_t n, int64_t grain, int64_t least, Denormals denormals, const Work& work) {
    int64_t parts = n / (least > 0 ? least : 1);
    const int64_t most = most_threads();
    if (parts > most) parts = most;
    if (parts <= 1) {
        FlushDenormals mode(denormals == Denormals::kFlush);
        if (n > 0) work((int64_t)0, n);
        return;
    }
    const int64_t grains = (n + grain - 1) / grain;
#if defined(_OPENMP)
#pragma omp parallel num_threads((int)parts)
#endif
    {
#if defined(_OPENMP)
        const int64_t index = omp_get_thread_num(), count = omp_get_num_threads(); /* may be fewer than asked for */
#else
        const int64_t index = 0, count = 1;
#endif
        const int64_t begin = grains * index / count * grain, stop = grains * (index + 1) / count * grain;
        const int64_t end = stop < n ? stop : n;
        FlushDenormals mode(denormals == Denormals::kFlush);
        if (begin < end) work(begin, end);
    }
}

#endif
