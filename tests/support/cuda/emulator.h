// CUDA kernels on the processor, for tests: a fiber for each thread of a block, no device, none of
// CUDA's headers. Blocks run one after another.
//
// The threads of a block run one at a time and change only where they wait for each other: at warp
// intrinsics and __syncthreads. Who goes on first is drawn from a seed (0: by number), so that what
// depends on an order which a device does not promise differs from seed to seed. Threads that wait
// for each other for ever, lanes that wait in different places and accesses that are not aligned
// end the process and are told on stderr; accesses out of bounds are AddressSanitizer's to find.
//
// Not seen: the order in which other blocks and ranks see stores, blocks at once, and time.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "driver.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#define EMULATOR_ASAN(...) __VA_ARGS__
#else
#define EMULATOR_ASAN(...)
#endif

struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
using cudaStream_t = void*;
using cudaError_t = int;
constexpr cudaError_t cudaSuccess = 0, cudaErrorInvalidValue = 1, cudaErrorNotReady = 600;
inline cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
inline cudaError_t cudaSetDevice(int) { return cudaSuccess; }
inline cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline cudaError_t cudaFree(void*) { return cudaSuccess; }
inline bool streams_are_busy = false;  // by emulate_busy; kernels are done when they were started
inline uint64_t stream_queries = 0;
inline cudaError_t cudaStreamQuery(cudaStream_t) {
  ++stream_queries;
  return streams_are_busy ? cudaErrorNotReady : cudaSuccess;
}
inline bool stream_is_captured = false;  // by emulate_capture
enum cudaStreamCaptureStatus { cudaStreamCaptureStatusNone, cudaStreamCaptureStatusActive };
inline cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  *status = stream_is_captured ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
// The device's multiprocessors, and the blocks that each of them holds at once. Few, so that the
// threads of a launch have several turns.
inline int multiprocessors = 1, blocks_of_one = 2;
enum cudaDeviceAttr { cudaDevAttrMultiProcessorCount };
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) {
  *value = multiprocessors;
  return cudaSuccess;
}
template <typename Kernel>
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, Kernel*, int, size_t) {
  *blocks = blocks_of_one;
  return cudaSuccess;
}
inline cudaError_t cudaDriverGetVersion(int* version) {
  *version = 13000;
  return cudaSuccess;
}
inline cudaError_t cudaRuntimeGetVersion(int* version) { return cudaDriverGetVersion(version); }
inline const char* cudaGetErrorString(cudaError_t error) {
  return error ? "invalid argument" : "no error";
}

namespace emulator {

constexpr unsigned kWarp = 32;
constexpr const char* kArchitectures = "800,900";
constexpr size_t kStackBytes = 96 << 10;
constexpr size_t kSharedBytes = 48 << 10;  // of a block that asks for no more

// Where a thread waits: told when it waits for ever.
struct Place {
  const char* what = nullptr;
  int line = 0;
  uint32_t mask = 0;
};

// A stack that a thread of each block runs on, one after the other: it begins once by `start`, and
// goes on by `here`, which makes no system call.
struct Fiber {
  std::unique_ptr<char[]> stack{new char[kStackBytes]};
  ucontext_t start;
  jmp_buf here;
  bool begun = false;
  EMULATOR_ASAN(void* fake_stack = nullptr;)
};

struct Thread {
  Fiber* fiber = nullptr;
  bool done = false;
  dim3 index;
  unsigned lane = 0, warp = 0;
  Place waits;
};

// Lanes of a warp that wait for each other under one mask. What they bring lies in one of two
// arrays by turns, as some may be at the next turn while others still read.
struct Meeting {
  uint32_t arrived = 0;
  uint64_t turn = 0;
  int line = 0;
  uint64_t brought[2][kWarp];
};

struct Block {
  std::function<void()> body;  // of each thread
  dim3 index, size, grid;
  std::vector<Thread> threads;
  std::vector<std::map<uint32_t, Meeting>> meetings;  // of each warp, by mask
  unsigned running = 0, at_barrier = 0;
  uint64_t barriers = 0;
  int counted[2] = {0, 0};  // what threads bring to a barrier
  uint64_t progress = 0;    // anything that lets a waiting thread go on
  uint64_t random = 0;
  Thread* now = nullptr;
  jmp_buf scheduler;
};

inline thread_local Block* block = nullptr;
EMULATOR_ASAN(inline thread_local const void* main_stack = nullptr;
              inline thread_local size_t main_bytes = 0;)
inline thread_local uint64_t seed = 0;  // of the launches to come, from emulate_order

[[noreturn]] inline void fail(const char* what) {
  std::fprintf(stderr, "CUDA emulator: %s, in block (%u, %u)\n", what, block->index.x,
               block->index.y);
  for (const Thread& thread : block->threads)
    if (!thread.done && thread.waits.what)
      std::fprintf(stderr, "  thread %ld waits in %s of line %d, mask %08x\n",
                   static_cast<long>(&thread - block->threads.data()), thread.waits.what,
                   thread.waits.line, thread.waits.mask);
  std::fflush(stderr);
  std::abort();
}

inline void check_aligned(const void* place, size_t bytes) {
  if (reinterpret_cast<uintptr_t>(place) % bytes) fail("an access that is not aligned");
}

// What other devices write while a kernel runs, as one range, and the launches so far: the fake
// NVSHMEM says it. It may not be read as what stays as it is.
inline thread_local uint64_t launches = 0;
inline thread_local uintptr_t changed_from = ~uintptr_t{0}, changed_to = 0;

inline void change(const void* place, size_t bytes) {
  const auto at = reinterpret_cast<uintptr_t>(place);
  changed_from = std::min(changed_from, at);
  changed_to = std::max(changed_to, at + bytes);
}

inline void check_unchanged(const void* place) {
  const auto at = reinterpret_cast<uintptr_t>(place);
  if (at >= changed_from && at < changed_to)
    fail("a read, as of what stays as it is, of what came while the kernel ran");
}

// Back to the scheduler, which comes back here later.
inline void yield() {
  Fiber& fiber = *block->now->fiber;  // here may be another block's then
  EMULATOR_ASAN(__sanitizer_start_switch_fiber(&fiber.fake_stack, main_stack, main_bytes);)
  if (!_setjmp(fiber.here)) _longjmp(block->scheduler, 1);
  EMULATOR_ASAN(__sanitizer_finish_switch_fiber(fiber.fake_stack, &main_stack, &main_bytes);)
}

// Told of lanes that have met, if anybody asks for it: the fake NVSHMEM does.
inline thread_local void (*when_met)(unsigned warp, uint32_t mask) = nullptr;

// Brings `value` and waits for the other lanes of `mask`; returns what each lane brought.
inline const uint64_t* meet(uint32_t mask, uint64_t value, const char* what, int line) {
  Block& b = *block;
  Thread& me = *b.now;
  if (!(mask >> me.lane & 1)) fail("a lane that is not in its own mask");
  Meeting& meeting = b.meetings[me.warp][mask];
  me.waits = {what, line, mask};
  if (meeting.arrived && meeting.line != line) fail("lanes that wait in different places");
  const uint64_t turn = meeting.turn;
  meeting.line = line;
  meeting.brought[turn % 2][me.lane] = value;
  meeting.arrived |= 1u << me.lane;
  if (meeting.arrived == mask) {
    meeting.arrived = 0;
    ++meeting.turn;
    ++b.progress;
    if (when_met) when_met(me.warp, mask);
  }
  while (meeting.turn == turn) yield();
  me.waits = {};
  return meeting.brought[turn % 2];
}

inline void open_barrier(Block& b) {
  b.at_barrier = 0;
  ++b.barriers;
  b.counted[b.barriers % 2] = 0;
  ++b.progress;
}

// __syncthreads_count: over the threads that have not returned.
inline int meet_all(int value, const char* what, int line) {
  Block& b = *block;
  Thread& me = *b.now;
  me.waits = {what, line, ~0u};
  const uint64_t turn = b.barriers;
  b.counted[turn % 2] += value;
  if (++b.at_barrier == b.running) {
    open_barrier(b);
  } else {
    while (b.barriers == turn) yield();
  }
  me.waits = {};
  return b.counted[turn % 2];
}

// What a fiber runs: a thread of each block.
inline void run_threads() {
  EMULATOR_ASAN(__sanitizer_finish_switch_fiber(nullptr, &main_stack, &main_bytes);)
  for (;;) {
    block->body();
    Block& b = *block;
    b.now->done = true;
    --b.running;
    ++b.progress;
    if (b.at_barrier && b.at_barrier == b.running) open_barrier(b);
    yield();
  }
}

[[gnu::noinline]] inline void begin(Fiber& fiber) {
  fiber.begun = true;
  getcontext(&fiber.start);
  fiber.start.uc_stack.ss_sp = fiber.stack.get();
  fiber.start.uc_stack.ss_size = kStackBytes;
  fiber.start.uc_link = nullptr;
  makecontext(&fiber.start, run_threads, 0);
  setcontext(&fiber.start);
}

[[gnu::noinline]] inline void go_on(Block& b, Thread& thread) {
  b.now = &thread;
  Fiber& fiber = *thread.fiber;
  EMULATOR_ASAN(void* mine = nullptr;
                __sanitizer_start_switch_fiber(&mine, fiber.stack.get(), kStackBytes);)
  if (!_setjmp(b.scheduler)) {
    if (fiber.begun) _longjmp(fiber.here, 1);
    begin(fiber);
  }
  EMULATOR_ASAN(__sanitizer_finish_switch_fiber(mine, nullptr, nullptr);)
}

inline void shuffle(Block& b, std::vector<unsigned>& order) {
  for (size_t n = order.size(); n > 1; --n) {
    b.random ^= b.random << 13;
    b.random ^= b.random >> 7;
    b.random ^= b.random << 17;
    std::swap(order[n - 1], order[b.random % n]);
  }
}

// So many fibers of this thread of the process at least.
inline std::vector<std::unique_ptr<Fiber>>& fibers(unsigned threads) {
  static thread_local std::vector<std::unique_ptr<Fiber>> made;
  while (made.size() < threads) made.emplace_back(new Fiber);
  return made;
}

// Shared memory of the block that runs: what nobody has written reads as NaN.
inline thread_local std::vector<unsigned char> shared;

inline void run_block(Block& b) {
  const unsigned count = b.size.x;
  auto& fiber = fibers(count);
  shared.assign(kSharedBytes, 0xFF);
  b.threads = std::vector<Thread>(count);
  b.meetings.assign((count + kWarp - 1) / kWarp, {});
  b.running = count;
  std::vector<unsigned> order(count);
  for (unsigned t = 0; t < count; ++t) {
    Thread& thread = b.threads[t];
    thread.index = dim3(t, 0, 0);
    thread.lane = t % kWarp;
    thread.warp = t / kWarp;
    thread.fiber = fiber[t].get();
    order[t] = t;
  }
  while (b.running) {
    const uint64_t before = b.progress;
    if (seed) shuffle(b, order);
    for (const unsigned t : order)
      if (!b.threads[t].done) go_on(b, b.threads[t]);
    if (b.progress == before) fail("threads that wait for each other for ever");
  }
}

// The blocks of the last launch, and whether launches are counted alone and not run.
inline uint64_t last_blocks = 0;
inline bool counts_alone = false;

// Runs `body` for each thread of each block.
inline cudaError_t run(dim3 grid, unsigned threads, std::function<void()> body) {
  last_blocks = uint64_t{grid.x} * grid.y;
  if (counts_alone) return cudaSuccess;
  Block b;
  b.body = std::move(body);
  ++launches;
  changed_from = ~uintptr_t{0}, changed_to = 0;
  b.random = seed * 0x9E3779B97F4A7C15u | 1;
  b.size = dim3(threads);
  b.grid = grid;
  block = &b;
  for (unsigned y = 0; y < grid.y; ++y) {
    for (unsigned x = 0; x < grid.x; ++x) {
      b.index = dim3(x, y, 0);
      run_block(b);
    }
  }
  block = nullptr;
  return cudaSuccess;
}

template <typename T>
uint64_t bits_of(T value) {
  static_assert(sizeof(T) <= sizeof(uint64_t));
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(T));
  return bits;
}

template <typename T>
T from_lane(uint32_t mask, T value, unsigned lane, const char* what, int line) {
  const uint64_t* const brought = meet(mask, bits_of(value), what, line);
  if (!(mask >> lane & 1)) fail("a shuffle from a lane that is not in the mask");
  T found;
  std::memcpy(&found, &brought[lane], sizeof(T));
  return found;
}

inline uint32_t ballot(uint32_t mask, bool predicate, int line) {
  const uint64_t* const brought = meet(mask, predicate, "__ballot_sync", line);
  uint32_t bits = 0;
  for (unsigned lane = 0; lane < kWarp; ++lane)
    bits |= static_cast<uint32_t>(mask >> lane & 1 && brought[lane]) << lane;
  return bits;
}

inline unsigned lane() { return block->now->lane; }

}  // namespace emulator

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__
#define threadIdx (::emulator::block->now->index)
#define blockIdx (::emulator::block->index)
#define blockDim (::emulator::block->size)
#define gridDim (::emulator::block->grid)

#define __syncthreads() ((void)::emulator::meet_all(0, "__syncthreads", __LINE__))
#define __syncthreads_count(p) (::emulator::meet_all((p) != 0, "__syncthreads_count", __LINE__))
#define __syncwarp(mask) ((void)::emulator::meet(mask, 0, "__syncwarp", __LINE__))
#define __shfl_sync(mask, value, lane) \
  (::emulator::from_lane(mask, value, lane, "__shfl_sync", __LINE__))
#define __shfl_xor_sync(mask, value, bits) \
  (::emulator::from_lane(mask, value, ::emulator::lane() ^ (bits), "__shfl_xor_sync", __LINE__))
#define __ballot_sync(mask, predicate) (::emulator::ballot(mask, predicate, __LINE__))

// Threads change only where they wait, so that these need no more than this.
template <typename T>
T atomicAdd(T* place, T value) {
  return std::exchange(*place, *place + value);
}
template <typename T>
T atomicMin(T* place, T value) {
  return std::exchange(*place, std::min(*place, value));
}
template <typename T>
T atomicOr(T* place, T value) {
  return std::exchange(*place, *place | value);
}

// The order of the launches to come, for whoever loads the kernels as a library.
extern "C" [[gnu::weak]] void emulate_order(uint64_t seed) { emulator::seed = seed; }

// Whether streams seem to have work that does not end.
extern "C" [[gnu::weak]] void emulate_busy(int busy) { streams_are_busy = busy; }

// A device of so many multiprocessors, which hold so many blocks each; where `counts_alone`, its
// kernels are launched and not run.
extern "C" [[gnu::weak]] void emulate_device(int count, int blocks, int counts_alone) {
  multiprocessors = count, blocks_of_one = blocks;
  emulator::counts_alone = counts_alone;
}

// The blocks of the last launch.
extern "C" [[gnu::weak]] uint64_t emulated_blocks() { return emulator::last_blocks; }

// The launches of this thread so far.
extern "C" [[gnu::weak]] uint64_t emulated_launches() { return emulator::launches; }

// Whether streams seem to be captured.
extern "C" [[gnu::weak]] void emulate_capture(int captured) { stream_is_captured = captured; }

// How often streams were asked whether their work is done.
extern "C" [[gnu::weak]] uint64_t emulated_queries() { return stream_queries; }
