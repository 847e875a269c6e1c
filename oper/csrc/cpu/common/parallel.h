// Work shared by torch's threads, in any order: tasks differ in cost, so a thread that is free
// takes the next one.
//
// The callers' sizes of a task (kRowsPerTask and the like) make it 10 to 200 µs of work at the
// rates of benchmarks/README.md: long beside the atomic addition that hands it out, short beside
// a batch, so that no thread is left waiting for long.
#pragma once

#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>
#include <cstdint>

namespace oper {

// body(next) runs once on each thread used; `next()` gives it the next of `count` tasks, or -1.
template <typename Body>
void share_out(int64_t count, const Body& body) {
  std::atomic<int64_t> taken{0};
  const auto next = [&]() -> int64_t {
    const int64_t task = taken.fetch_add(1, std::memory_order_relaxed);
    return task < count ? task : -1;
  };
  const int64_t threads = std::min<int64_t>(at::get_num_threads(), count);
  at::parallel_for(0, threads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t thread = begin; thread < end; ++thread) body(next);
  });
}

}  // namespace oper
