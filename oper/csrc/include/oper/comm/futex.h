// Counters in shared memory on which processes wait asleep (Linux futexes).
//
// Each counter lies alone on a cache line, so that a rank that posts one disturbs nobody who polls
// another. A negative counter says that its rank has failed: it ends every wait for it.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdint>
#include <ctime>

namespace oper {

struct alignas(64) Word {
  std::atomic<int32_t> value;
};
static_assert(sizeof(Word) == 64 && std::atomic<int32_t>::is_always_lock_free,
              "made by oper/runtime/comm/signals.py as 16 int32");

inline long futex(std::atomic<int32_t>& word, int operation, int32_t value, const timespec* until) {
  return syscall(SYS_futex, &word, operation, value, until, nullptr, FUTEX_BITSET_MATCH_ANY);
}

// Stores a value, after which all that this thread wrote before is seen by who reads it.
inline void post(Word& word, int32_t value) {
  word.value.store(value, std::memory_order_release);
  futex(word.value, FUTEX_WAKE, INT32_MAX, nullptr);
}

inline timespec monotonic_in(int64_t timeout_ms) {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  const int64_t nanoseconds = now.tv_nsec + timeout_ms % 1000 * 1000000;
  return {static_cast<time_t>(now.tv_sec + timeout_ms / 1000 + nanoseconds / 1000000000),
          static_cast<long>(nanoseconds % 1000000000)};
}

// Sleeps until all words are at least `value`, and returns -1; or returns the index of one that is
// not, when it is negative, when `timeout_ms` have passed, or when a signal came, whose handler may
// be waiting for this thread to return.
inline int64_t wait_for_all(Word* words, int64_t count, int32_t value, int64_t timeout_ms) {
  timespec until{};
  bool timed = false;
  for (int64_t n = 0; n < count; ++n) {
    bool ended = timeout_ms <= 0;
    for (;;) {
      const int32_t now = words[n].value.load(std::memory_order_acquire);
      if (now >= value) break;
      if (now < 0 || ended) return n;
      if (!timed) until = monotonic_in(timeout_ms);
      timed = true;
      // EAGAIN: the word changed before we slept. ETIMEDOUT and EINTR: one last look.
      ended = futex(words[n].value, FUTEX_WAIT_BITSET, now, &until) != 0 && errno != EAGAIN;
    }
  }
  return -1;
}

}  // namespace oper
