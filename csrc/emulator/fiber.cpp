// Fibers of the emulator (see fiber.h) and what the sanitizers are told about them.
#include "fiber.h"

#include <sys/mman.h>

#include <cstdint>
#include <cstdlib>
#if defined(FW_EMULATOR_ASAN)
#include <sanitizer/common_interface_defs.h>
#endif
#if defined(FW_EMULATOR_TSAN)
#include <sanitizer/tsan_interface.h>
#endif
#if !defined(__x86_64__)
#error "the emulator switches stacks with x86-64 instructions: build it on an x86-64 machine"
#endif

// void emulator_switch(void** save, void* to): push what a function must preserve, exchange stack pointers, pop it again.
extern "C" void emulator_switch(void** save, void* to);
asm(R"(.text
.globl emulator_switch
.hidden emulator_switch
.type emulator_switch,@function
emulator_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp,(%rdi)
  movq %rsi,%rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size emulator_switch,.-emulator_switch
)");

namespace emulator {
namespace {

void* launcher_stack_pointer = nullptr;

void* map(size_t bytes) {
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) abort();
  return memory;
}

#if defined(FW_EMULATOR_ASAN)
void* launcher_asan_stack = nullptr;
const void* launcher_stack_bottom = nullptr;
size_t launcher_stack_bytes = 0;
#endif

#if defined(FW_EMULATOR_TSAN)
void* launcher_tsan_fiber = nullptr;

// Addresses that are never given out twice: a reused one would look like a race with its previous owner, or hide one.
char* fresh_memory(size_t bytes) {
  constexpr size_t kArenaBytes = size_t(1) << 36;
  static char* arena = static_cast<char*>(map(kArenaBytes));
  static size_t used = 0;
  char* memory = arena + used;
  used += (bytes + 255) / 256 * 256;
  if (used > kArenaBytes) abort();
  return memory;
}
#endif

void switch_to_launcher(Fiber& fiber, bool for_good) {
#if defined(FW_EMULATOR_TSAN)
  __tsan_switch_to_fiber(launcher_tsan_fiber, __tsan_switch_to_fiber_no_sync);
#endif
#if defined(FW_EMULATOR_ASAN)
  __sanitizer_start_switch_fiber(for_good ? nullptr : &fiber.asan_stack, launcher_stack_bottom, launcher_stack_bytes);
#endif
  (void)for_good;
  emulator_switch(&fiber.stack_pointer, launcher_stack_pointer);
#if defined(FW_EMULATOR_ASAN)
  __sanitizer_finish_switch_fiber(fiber.asan_stack, &launcher_stack_bottom, &launcher_stack_bytes);
#endif
}

}  // namespace

void prepare(Fiber& fiber, void (*entry)()) {
#if defined(FW_EMULATOR_TSAN)
  fiber.stack = fresh_memory(kStackBytes);
  fiber.tsan_fiber = __tsan_create_fiber(0);
#else
  if (!fiber.stack) fiber.stack = static_cast<char*>(map(kStackBytes));
#endif
  void** top = reinterpret_cast<void**>(fiber.stack + kStackBytes - 64);
  *--top = nullptr;  // where `entry` would return to; keeps the stack aligned to 16 bytes at its first instruction
  *--top = reinterpret_cast<void*>(entry);
  for (int saved_register = 0; saved_register < 6; saved_register++) *--top = nullptr;
  fiber.stack_pointer = top;
}

void enter(Fiber& fiber) {
#if defined(FW_EMULATOR_TSAN)
  launcher_tsan_fiber = __tsan_get_current_fiber();
  __tsan_switch_to_fiber(fiber.tsan_fiber, __tsan_switch_to_fiber_no_sync);
#endif
#if defined(FW_EMULATOR_ASAN)
  __sanitizer_start_switch_fiber(&launcher_asan_stack, fiber.stack, kStackBytes);
#endif
  emulator_switch(&launcher_stack_pointer, fiber.stack_pointer);
#if defined(FW_EMULATOR_ASAN)
  __sanitizer_finish_switch_fiber(launcher_asan_stack, nullptr, nullptr);
#endif
}

void entered_first() {
#if defined(FW_EMULATOR_ASAN)
  __sanitizer_finish_switch_fiber(nullptr, &launcher_stack_bottom, &launcher_stack_bytes);
#endif
}

void leave(Fiber& fiber) { switch_to_launcher(fiber, false); }

void leave_for_good(Fiber& fiber) {
  switch_to_launcher(fiber, true);
  abort();
}

void destroy(Fiber& fiber) {
#if defined(FW_EMULATOR_TSAN)
  if (fiber.tsan_fiber) __tsan_destroy_fiber(fiber.tsan_fiber);
  fiber.tsan_fiber = nullptr;
#else
  (void)fiber;
#endif
}

void release(void* point) {
#if defined(FW_EMULATOR_TSAN)
  __tsan_release(point);
#else
  (void)point;
#endif
}

void acquire(void* point) {
#if defined(FW_EMULATOR_TSAN)
  __tsan_acquire(point);
#else
  (void)point;
#endif
}

char* allocate(size_t bytes) {
#if defined(FW_EMULATOR_TSAN)
  return fresh_memory(bytes);
#else
  void* memory = nullptr;
  if (posix_memalign(&memory, 128, bytes)) abort();
  return static_cast<char*>(memory);
#endif
}

void deallocate(char* memory) {
#if defined(FW_EMULATOR_TSAN)
  (void)memory;
#else
  free(memory);
#endif
}

}  // namespace emulator
