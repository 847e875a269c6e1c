// A training step of rows that nobody else has gradients of, on a device: each row's gradients of a
// batch are summed (sum_gradients.cuh) by the threads that then take its step (update_rows.cuh), so
// that no sum is written but those of long runs, which launches before have made.
//
// A row takes three reads, one after the other: where its run begins, where the gradient of its
// first access lies, and that gradient. The first two are made while the rows before are at work:
// most runs have one access, and their rows then wait for memory once.
#pragma once

#include "oper/cuda/sum_gradients.cuh"
#include "oper/cuda/update_rows.cuh"

namespace oper {

// The runs of a batch, and the sums of their gradients.
template <int kCount>
struct RunGradients {
  static constexpr int kAhead = 2;  // gradients of a row that are on their way

  const RunUpdateArguments& given;
  const SumArguments& a;
  int first;  // of the batch's runs
  int count;
  // The run that the threads of a row work on, and the next one.
  Span run, next;
  int64_t slot = -1, next_slot = -1;
  uint32_t place = 0, next_place = 0;  // of the gradient of its first access
  bool mine = false;

  __device__ explicit RunGradients(const RunUpdateArguments& given)
      : given(given),
        a(given.sums),
        first(static_cast<int>(a.groups[a.first_group])),
        count(static_cast<int>(a.groups[a.last_group]) - first) {}

  __device__ Span run_at(int n) const {
    if (n >= count) return {};
    return {a.run_start[first + n], a.run_start[first + n + 1]};
  }
  __device__ int64_t slot_at(int n) const { return n < count ? given.run_slot[first + n] : -1; }

  // Run n is the first of this thread's.
  __device__ void begin(int n) {
    next = run_at(n);
    next_slot = slot_at(n);
    look_ahead();
  }

  // Goes on from run n - step to run n, and loads what the one after it is known by.
  __device__ void take(int n, int step) {
    run = next;
    slot = next_slot;
    place = next_place;
    // A slot that is not the arena's is left alone: the host cannot look at it without a wait.
    mine = static_cast<uint64_t>(slot) < static_cast<uint64_t>(given.slots);
    next = run_at(n + step);
    next_slot = slot_at(n + step);
  }

  // Loads what hangs on what `take` loaded.
  __device__ void look_ahead() { next_place = next.begin < next.end ? a.place[next.begin] : 0; }

  // kCount values of the row's gradient, from value d on.
  __device__ void gather(int d, bool there, float (&g)[kCount]) const {
#pragma unroll
    for (int k = 0; k < kCount; ++k) g[k] = 0;
    if (!there) return;
    if (run.end - run.begin > kAccessesPerPiece) {
      const int64_t window = (run.begin - a.run_start[first]) / kAccessesPerPiece;
      load_gradient(a.partial + place_of(window, 0) * a.dim + d, g);
      return;
    }
    uint32_t at = place;
    for (int n = run.begin; n < run.end; n += kAhead) {
      if (n > run.begin) at = a.place[n];
      const Turn<Float32Row, 4 * kCount, kAhead> turn(a, n, run.end, at, d);
#pragma unroll
      for (int u = 0; u < kAhead; ++u)
        if (n + u < run.end) turn.add(u, g);
    }
#pragma unroll
    for (int k = 0; k < kCount; ++k) g[k] *= a.scale;
  }
};

template <typename Optimizer, int kCount, bool kThere>
__global__ void __launch_bounds__(256, kThere ? 3 : 4)
    step_runs(const __grid_constant__ RunUpdateArguments a) {
  RunGradients<kCount> row(a);
  step_all<Optimizer, kCount, kThere>(a, group_of_lanes(static_cast<int>(a.lanes)), row);
}

}  // namespace oper
