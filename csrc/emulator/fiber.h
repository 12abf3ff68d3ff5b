// One CUDA thread of the emulator: a call stack that can be left in the middle of a kernel and entered again.
//
// All fibers of a launch run on the one operating-system thread that launched it; `launcher` is that thread's own stack. A switch saves the
// six registers that a C function must preserve, so it costs a few nanoseconds and a block of 1024 threads is no burden.
//
// Unusual: address and thread sanitizer follow call stacks by themselves and must be told of each switch. The runtime is therefore compiled
// WITHOUT -fsanitize, and told by FW_EMULATOR_ASAN or FW_EMULATOR_TSAN which sanitizer the kernels beside it carry.
#pragma once
#include <cstddef>

namespace emulator {

#if defined(FW_EMULATOR_TSAN)
constexpr size_t kStackBytes = size_t(1) << 15;  // never used twice there, so smaller
#else
constexpr size_t kStackBytes = size_t(1) << 17;
#endif

struct Fiber {
  void* stack_pointer = nullptr;
  char* stack = nullptr;
  void* tsan_fiber = nullptr;
  void* asan_stack = nullptr;
};

// Give `fiber` a stack on which `entry` will start; `entry` must end with `leave_for_good`.
void prepare(Fiber& fiber, void (*entry)());
// Run `fiber` until it leaves. Called by the launcher.
void enter(Fiber& fiber);
// The first thing that `entry` does.
void entered_first();
// Go back to the launcher; a later `enter` continues here.
void leave(Fiber& fiber);
[[noreturn]] void leave_for_good(Fiber& fiber);
void destroy(Fiber& fiber);

// A happens-before edge through `point`, for the thread sanitizer only.
void release(void* point);
void acquire(void* point);

// Block-local memory: with red zones under the address sanitizer; under the thread sanitizer at addresses that were never used before.
char* allocate(size_t bytes);
void deallocate(char* memory);

}  // namespace emulator
