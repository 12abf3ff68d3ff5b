// What the emulator's header promises to kernels: where a thread is, barriers, exchange within a warp, shared memory, launches.
//
// A launch runs its blocks one after another; within a block every thread is a fiber that runs until it waits for others. Three schedules
// (`fw_emulator_schedule`) run blocks and threads forwards, backwards or in a seeded random order: a kernel whose result depends on it has
// a race.
//
// A kernel that breaks a rule (divergent barrier, deadlock, bad mask, too much shared memory, impossible launch) is abandoned: the launch
// reports what happened and at which source lines threads waited, `last_error` gives cudaErrorLaunchFailure or
// cudaErrorInvalidConfiguration once, and the process lives on. What the rules are about is in csrc/emulator/README.md.
#pragma once
#include <cstddef>
#include <cstdint>

struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

namespace emulator {

constexpr int kWarpThreads = 32;
constexpr size_t kSharedBytes = 48 * 1024;  // what a launch gets on every device without asking for more

struct Position {
  dim3 thread, block, block_size, grid_size;
  int thread_number = 0;  // threadIdx, linear
  char* dynamic_shared = nullptr;
};
// Of the thread that runs. Written by the runtime only, which no sanitizer watches.
extern Position position;

// `where` is the source line, for reports, and tells barriers apart.
void block_barrier(const char* where);
void warp_barrier(unsigned mask, const char* where);
uint64_t exchange_bits(unsigned mask, uint64_t value, int source_lane, const char* where);
unsigned ballot(unsigned mask, bool predicate, const char* where);

// The block's memory for the array identified by `key`, made at first use and filled with 0xFF bytes: NaN, or -1.
void* shared_memory(const void* key, size_t bytes);

// `thread_body(arguments)` is what each thread does.
void launch(dim3 grid, dim3 block, size_t dynamic_shared_bytes, void (*thread_body)(const void*), const void* arguments);
int last_error();

inline int lane() { return position.thread_number % kWarpThreads; }

template <class T>
T exchange(unsigned mask, T value, int source_lane, const char* where) {
  static_assert(sizeof(T) <= 8, "a shuffle moves 4 or 8 bytes");
  uint64_t bits = 0;
  __builtin_memcpy(&bits, &value, sizeof(T));
  bits = exchange_bits(mask, bits, source_lane, where);
  __builtin_memcpy(&value, &bits, sizeof(T));
  return value;
}

template <class Body>
void launch(dim3 grid, dim3 block, size_t dynamic_shared_bytes, const Body& body) {
  launch(grid, block, dynamic_shared_bytes, [](const void* b) { (*static_cast<const Body*>(b))(); }, &body);
}

template <class T, int N>
auto shared_array(const void* key) -> T (&)[N] {
  return *reinterpret_cast<T(*)[N]>(shared_memory(key, sizeof(T) * N));
}

}  // namespace emulator

extern "C" {
// 0: forwards, 1: backwards, 2: random by `seed`; for all following launches.
__attribute__((visibility("default"))) void fw_emulator_schedule(int order, unsigned seed);
// What the last broken rule was, "" if none; cleared by the call.
__attribute__((visibility("default"))) const char* fw_emulator_report();
}
