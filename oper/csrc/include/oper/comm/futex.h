// Signals: counters in shared memory on which processes sleep until they reach a value (Linux
// futexes).
//
// Each lies alone on a cache line, so that posting one does not disturb processes that poll
// another. A negative counter says that its rank has failed, and ends every wait for it.
//
// Posting calls the kernel only where somebody sleeps. No wake is lost: a process counts itself in
// `sleepers` before the kernel compares the value and puts it to sleep, and whoever posts stores
// the value before it reads `sleepers`. In the one order of these four (they are sequentially
// consistent), either the post sees the sleeper, or the kernel sees the new value. A process that
// was killed in its sleep stays counted, and costs later posts a call each.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdint>
#include <ctime>

namespace oper {

struct alignas(64) Signal {
  std::atomic<int32_t> value;
  std::atomic<int32_t> sleepers;
};
static_assert(std::atomic<int32_t>::is_always_lock_free);

inline long futex(std::atomic<int32_t>& value, int operation, int32_t operand,
                  const timespec* until) {
  return syscall(SYS_futex, &value, operation, operand, until, nullptr, FUTEX_BITSET_MATCH_ANY);
}

// Stores a value; a thread that reads it sees all that this one wrote before.
inline void post(Signal& signal, int32_t value) {
  signal.value.store(value, std::memory_order_seq_cst);
  if (signal.sleepers.load(std::memory_order_seq_cst) != 0) {
    futex(signal.value, FUTEX_WAKE, INT32_MAX, nullptr);
  }
}

inline timespec monotonic_in(int64_t timeout_ms) {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  const int64_t nanoseconds = now.tv_nsec + timeout_ms % 1000 * 1000000;
  return {static_cast<time_t>(now.tv_sec + timeout_ms / 1000 + nanoseconds / 1000000000),
          static_cast<long>(nanoseconds % 1000000000)};
}

// Sleeps until all signals are at least `value`, and returns -1; or returns the index of one that
// is not, when it is negative, when `timeout_ms` have passed, or when a signal came, whose handler
// may be waiting for this thread to return.
inline int64_t wait_for_all(Signal* signals, int64_t count, int32_t value, int64_t timeout_ms) {
  timespec until{};
  bool timed = false;
  for (int64_t n = 0; n < count; ++n) {
    bool ended = timeout_ms <= 0;
    for (;;) {
      const int32_t now = signals[n].value.load(std::memory_order_acquire);
      if (now >= value) break;
      if (now < 0 || ended) return n;
      if (!timed) until = monotonic_in(timeout_ms);
      timed = true;
      // EAGAIN: the value changed before we slept. ETIMEDOUT and EINTR: one last look.
      signals[n].sleepers.fetch_add(1, std::memory_order_seq_cst);
      ended = futex(signals[n].value, FUTEX_WAIT_BITSET, now, &until) != 0 && errno != EAGAIN;
      signals[n].sleepers.fetch_sub(1, std::memory_order_relaxed);
    }
  }
  return -1;
}

}  // namespace oper
