// Kernels with faults, and the same without, to test the emulator by: NAME SEED prints the result.

#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "oper/cuda/device.h"

namespace {

constexpr unsigned kThreads = 64;

// The sum of 0 to 63 by halves, in memory that all threads share; `waits`: with the barriers that
// it needs.
void sum_by_halves(int* out, bool waits) {
  int* const shared = reinterpret_cast<int*>(emulator::shared.data());
  const unsigned thread = threadIdx.x;
  shared[thread] = static_cast<int>(thread);
  __syncthreads();
  for (unsigned half = kThreads / 2; half > 0; half /= 2) {
    const int other = thread < half ? shared[thread + half] : 0;
    if (waits) __syncthreads();
    if (thread < half) shared[thread] += other;
    if (waits) __syncthreads();
  }
  if (thread == 0) *out = shared[0];
}

// A state of each group of lanes is written by the first lane; without waiting, before all others
// have read it.
void write_before_read(int* out, bool waits) {
  const unsigned lane = threadIdx.x % 32;
  int* const state = out + threadIdx.x / 32;
  if (!waits && lane == 0) *state = 1;
  const int before = __ballot_sync(~0u, *state == 0) == ~0u;
  if (waits && lane == 0) *state = 1;
  __syncwarp(~0u);
  if (lane == 31 && !before) *state = 100;
}

// Odd lanes leave before the others wait for all.
void leave_early(int* out) {
  if (threadIdx.x % 2) return;
  __syncwarp(~0u);
  *out = 1;
}

// Lanes of one warp wait in two places.
void wait_apart(int* out) {
  if (threadIdx.x % 2)
    __syncwarp(~0u);
  else
    __syncwarp(~0u);
  *out = 1;
}

void shuffle_from_outside(int* out) { *out = __shfl_sync(0xFFu, 1, threadIdx.x < 8 ? 9 : 0); }

void load_unaligned(int* out, const uint8_t* rows) {
  *out = static_cast<int>(oper::load_row<16>(rows + 4).word[0]);
}

// The last thread reads one row beyond the end.
void read_beyond(int* out, const uint8_t* rows) {
  const auto piece = oper::load_row<16>(rows + 16 * (threadIdx.x + 1));
  if (piece.word[0]) *out = 1;
}

}  // namespace

int main(int, char** arguments) {
  const std::string name = arguments[1];
  emulator::seed = std::strtoull(arguments[2], nullptr, 10);
  std::vector<int> out(2, 0);
  auto* const rows = static_cast<uint8_t*>(std::aligned_alloc(16, 16 * kThreads));
  for (unsigned n = 0; n < 16 * kThreads; ++n) rows[n] = 0;
  const oper::Launch how{dim3(1), name == "shuffle_from_outside" ? 8 : kThreads, nullptr};
  int* const to = out.data();
  if (name == "sum_by_halves") oper::launch(how, sum_by_halves, to, true);
  if (name == "no_barrier") oper::launch(how, sum_by_halves, to, false);
  if (name == "write_after_read") oper::launch(how, write_before_read, to, true);
  if (name == "write_before_read") oper::launch(how, write_before_read, to, false);
  if (name == "leave_early") oper::launch(how, leave_early, to);
  if (name == "wait_apart") oper::launch(how, wait_apart, to);
  if (name == "shuffle_from_outside") oper::launch(how, shuffle_from_outside, to);
  const uint8_t* const from = rows;
  if (name == "load_unaligned") oper::launch(how, load_unaligned, to, from);
  if (name == "read_beyond") oper::launch(how, read_beyond, to, from);
  std::printf("%d %d\n", out[0], out[1]);
  std::free(rows);
}
