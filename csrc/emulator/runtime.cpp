// The emulator's runtime (see runtime.h): scheduler, barriers, exchange within warps, shared memory, reports.
#include "runtime.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "fiber.h"

namespace emulator {

Position position;

namespace {

// A meeting point. Everyone waits until `needed` have arrived; then the generation goes up and all go on.
struct Barrier {
  unsigned generation = 0;
  int arrived = 0;
  const char* where = nullptr;
};

// The lanes of one mask of one warp. Values of two generations are kept: a lane may publish its next one before a slower lane has read.
struct Collective {
  unsigned mask = 0;
  Barrier barrier;
  uint64_t published[2][kWarpThreads];
};

// No memory is allocated while a fiber runs, or the thread sanitizer would take malloc and free for accesses of different threads.
constexpr int kMostMasks = 8, kMostSharedArrays = 32;

struct Warp {
  Collective collectives[kMostMasks];
  int masks = 0;
};

struct Thread {
  Fiber fiber;
  dim3 index;
  bool done = true;
  Barrier* waits_for = nullptr;
  unsigned generation = 0;
  const char* where = "";
};

struct SharedArray {
  const void* key;
  char* memory;
};

struct Block {
  std::vector<Thread> threads;
  int count = 0;  // of threads in this block; `threads` may be longer
  int alive = 0;
  Thread* running = nullptr;
  Barrier barrier;
  std::vector<Warp> warps;
  SharedArray shared[kMostSharedArrays];
  int shared_arrays = 0;
  size_t shared_bytes = 0;
  void (*body)(const void*) = nullptr;
  const void* arguments = nullptr;
  bool failed = false;
};

Block block;
std::string report;
int error = 0;
int schedule_order = 0;
uint32_t random_state = 1;
char end_of_launch;  // where each thread's work is released to the launcher

constexpr int kInvalidConfiguration = 9, kLaunchFailure = 719;  // cudaError_t

void record(int code, std::string what) {
  error = code;
  std::map<std::string, int> waiting;
  for (int i = 0; i < block.count; i++) {
    const Thread& thread = block.threads[i];
    if (!thread.done && thread.waits_for && thread.waits_for->generation == thread.generation) waiting[thread.where]++;
  }
  for (const auto& [where, threads] : waiting) what += "\n  " + std::to_string(threads) + " thread(s) wait at " + where;
  report = what;
  fprintf(stderr, "emulator: %s\n", report.c_str());
}

std::string in_block(const std::string& what) {
  const dim3 b = position.block;
  return what + " (block " + std::to_string(b.x) + "," + std::to_string(b.y) + "," + std::to_string(b.z) + ", thread " +
         std::to_string(position.thread_number) + ")";
}

// The running thread broke a rule: give up the launch.
[[noreturn]] void give_up(const std::string& what) {
  record(kLaunchFailure, in_block(what));
  block.failed = true;
  leave_for_good(block.running->fiber);
}

void arrive(Barrier& barrier, int needed, const char* where) {
  Thread& thread = *block.running;
  const unsigned generation = barrier.generation;
  if (++barrier.arrived == needed) {
    barrier.arrived = 0;
    barrier.generation++;
    return;
  }
  thread.waits_for = &barrier;
  thread.generation = generation;
  thread.where = where;
  leave(thread.fiber);
  thread.waits_for = nullptr;
}

unsigned lanes_that_exist() {
  const int first = position.thread_number / kWarpThreads * kWarpThreads;
  const int lanes = block.count - first;
  return lanes >= kWarpThreads ? ~0u : (1u << lanes) - 1;
}

Collective& collective(unsigned mask, const char* where) {
  mask &= lanes_that_exist();
  if (!(mask >> lane() & 1)) give_up(std::string("a lane is not in its own mask at ") + where);
  Warp& warp = block.warps[position.thread_number / kWarpThreads];
  Collective* found = nullptr;
  for (int i = 0; i < warp.masks; i++)
    if (warp.collectives[i].mask == mask) found = &warp.collectives[i];
  if (!found) {
    if (warp.masks == kMostMasks) give_up("more different masks in one warp than the emulator follows");
    found = &warp.collectives[warp.masks++];
    found->mask = mask;
  }
  if (found->barrier.arrived && strcmp(found->barrier.where, where))
    give_up(std::string("lanes of a warp are in different collectives: ") + found->barrier.where + " and " + where);
  found->barrier.where = where;
  return *found;
}

void arrive_in_warp(Collective& lanes, const char* where) { arrive(lanes.barrier, __builtin_popcount(lanes.mask), where); }

void thread_entry() {
  entered_first();
  block.body(block.arguments);
  release(&end_of_launch);
  block.running->done = true;
  block.alive--;
  if (block.alive && block.barrier.arrived == block.alive) {  // the others waited only for this one
    block.barrier.arrived = 0;
    block.barrier.generation++;
  }
  leave_for_good(block.running->fiber);
}

uint32_t random_below(uint32_t bound) {
  random_state = random_state * 1664525u + 1013904223u;
  return (random_state >> 8) % bound;
}

// 0, 1, ..., count - 1 in the order of the schedule.
std::vector<unsigned> ordered(unsigned count) {
  std::vector<unsigned> order(count);
  for (unsigned i = 0; i < count; i++) order[i] = schedule_order == 1 ? count - 1 - i : i;
  if (schedule_order == 2)
    for (unsigned i = count; i > 1; i--) std::swap(order[i - 1], order[random_below(i)]);
  return order;
}

char* poisoned(size_t bytes) {
  char* memory = allocate(bytes);
  for (size_t i = 0; i < bytes; i++) static_cast<volatile char*>(memory)[i] = char(0xFF);  // not memset, which the thread sanitizer watches
  return memory;
}

void start_block(dim3 block_size, size_t dynamic_bytes) {
  block.barrier = Barrier();
  block.alive = block.count;
  block.shared_bytes = dynamic_bytes;
  for (Warp& warp : block.warps) warp = Warp();
  if (dynamic_bytes) position.dynamic_shared = poisoned(dynamic_bytes);
  for (int i = 0; i < block.count; i++) {
    Thread& thread = block.threads[i];
    thread.index = dim3(i % block_size.x, i / block_size.x % block_size.y, i / block_size.x / block_size.y);
    thread.done = false;
    thread.waits_for = nullptr;
    prepare(thread.fiber, thread_entry);
  }
}

void run_block() {
  while (block.alive && !block.failed) {
    bool progress = false;
    for (unsigned i : ordered(block.count)) {
      Thread& thread = block.threads[i];
      if (thread.done || (thread.waits_for && thread.waits_for->generation == thread.generation)) continue;
      progress = true;
      block.running = &thread;
      position.thread = thread.index;
      position.thread_number = int(i);
      enter(thread.fiber);
      if (block.failed) return;
    }
    if (!progress) {
      record(kLaunchFailure, in_block("deadlock: a barrier or warp collective that some threads never reach"));
      block.failed = true;
    }
  }
}

void end_block() {
  for (int i = 0; i < block.count; i++) destroy(block.threads[i].fiber);
  for (int i = 0; i < block.shared_arrays; i++) deallocate(block.shared[i].memory);
  block.shared_arrays = 0;
  if (position.dynamic_shared) deallocate(position.dynamic_shared);
  position.dynamic_shared = nullptr;
}

}  // namespace

void block_barrier(const char* where) {
  if (block.barrier.arrived && strcmp(block.barrier.where, where))
    give_up(std::string("divergent __syncthreads: ") + block.barrier.where + " and " + where);
  block.barrier.where = where;
  release(&block.barrier);
  arrive(block.barrier, block.alive, where);
  acquire(&block.barrier);
}

void warp_barrier(unsigned mask, const char* where) {
  Collective& lanes = collective(mask, where);
  release(&lanes);
  arrive_in_warp(lanes, where);
  acquire(&lanes);
}

uint64_t exchange_bits(unsigned mask, uint64_t value, int source_lane, const char* where) {
  Collective& lanes = collective(mask, where);
  if (source_lane < 0 || source_lane >= kWarpThreads || !(lanes.mask >> source_lane & 1))
    give_up(std::string("a shuffle reads a lane outside of its mask at ") + where);
  uint64_t* published = lanes.published[lanes.barrier.generation & 1];
  published[lane()] = value;
  arrive_in_warp(lanes, where);
  return published[source_lane];
}

unsigned ballot(unsigned mask, bool predicate, const char* where) {
  Collective& lanes = collective(mask, where);
  uint64_t* published = lanes.published[lanes.barrier.generation & 1];
  published[lane()] = predicate;
  arrive_in_warp(lanes, where);
  unsigned votes = 0;
  for (int i = 0; i < kWarpThreads; i++)
    if (lanes.mask >> i & 1) votes |= unsigned(published[i]) << i;
  return votes;
}

void* shared_memory(const void* key, size_t bytes) {
  for (int i = 0; i < block.shared_arrays; i++)
    if (block.shared[i].key == key) return block.shared[i].memory;
  if (block.shared_arrays == kMostSharedArrays) give_up("more shared arrays than the emulator follows");
  block.shared_bytes += bytes;
  if (block.shared_bytes > kSharedBytes)
    give_up("more shared memory than a launch may use: " + std::to_string(block.shared_bytes) + " bytes of " +
            std::to_string(kSharedBytes));
  SharedArray& array = block.shared[block.shared_arrays++];
  array = {key, poisoned(bytes)};
  return array.memory;
}

void launch(dim3 grid, dim3 block_size, size_t dynamic_shared_bytes, void (*thread_body)(const void*), const void* arguments) {
  static std::mutex one_at_a_time;
  std::lock_guard<std::mutex> lock(one_at_a_time);
  const uint64_t threads = uint64_t(block_size.x) * block_size.y * block_size.z;
  block.count = 0;
  if (threads < 1 || threads > 1024 || !grid.x || !grid.y || !grid.z || grid.x > 0x7fffffffu || grid.y > 65535 || grid.z > 65535 ||
      dynamic_shared_bytes > kSharedBytes) {
    record(kInvalidConfiguration, "a launch that no device can do: grid " + std::to_string(grid.x) + "," + std::to_string(grid.y) + "," +
                                      std::to_string(grid.z) + ", " + std::to_string(threads) + " threads, " +
                                      std::to_string(dynamic_shared_bytes) + " bytes of shared memory");
    return;
  }
  block.count = int(threads);
  if (block.threads.size() < threads) block.threads.resize(threads);
  block.warps.resize((threads + kWarpThreads - 1) / kWarpThreads);
  block.body = thread_body;
  block.arguments = arguments;
  block.failed = false;
  position.block_size = block_size;
  position.grid_size = grid;
  const uint64_t blocks = uint64_t(grid.x) * grid.y * grid.z;
  for (unsigned i : ordered(unsigned(blocks))) {
    position.block = dim3(i % grid.x, i / grid.x % grid.y, i / grid.x / grid.y);
    start_block(block_size, dynamic_shared_bytes);
    run_block();
    end_block();
    if (block.failed) break;
  }
  acquire(&end_of_launch);
}

int last_error() {
  const int code = error;
  error = 0;
  return code;
}

}  // namespace emulator

extern "C" void fw_emulator_schedule(int order, unsigned seed) {
  emulator::schedule_order = order;
  emulator::random_state = seed;
}

extern "C" const char* fw_emulator_report() {
  static std::string given;
  given.swap(emulator::report);
  emulator::report.clear();
  return given.c_str();
}
