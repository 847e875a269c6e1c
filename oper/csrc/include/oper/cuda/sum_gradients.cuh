// Gradients of a batch summed by row on a device: the sums of step/sum_gradients.h, bit by bit.
//
//     sum[run] = scale · sum over the run's accesses n, in order, of factor[n] · grad[bag of n]
//
// As there, the places of the accesses' gradients are found first, by a launch of a thread an
// access, so that the sums have but one read to wait for before they know which gradients to read.
//
// kLanes threads hold a gradient together, kBytes of it each, and take a few runs that follow each
// other: their accesses do too, so that kAhead gradients are read at a time whatever the runs'
// lengths, and a sum is stored wherever a run ends. How many runs there are is known on the device
// alone: the grid is as large as all accesses could need, and what there is is spread over it.
//
// A run of more than kAccessesPerPiece accesses is summed by pieces (step/pieces.h), by threads
// anywhere; another launch adds its pieces up. No list of such runs is made, and nothing counted.
// Instead all accesses are cut into windows of kAccessesPerPiece. In a window two pieces begin at
// the most: one of a run that began before it, and the first one of a run that begins in it, as the
// next long run begins after it. So there are two places for partial sums for each window, and for
// each of them a search tells whether it has a piece.
#pragma once

#include "oper/cuda/device.h"
#include "oper/cuda/launchers.h"
#include "oper/cuda/row_values.cuh"
#include "oper/cuda/search.cuh"
#include "oper/step/feature.h"
#include "oper/step/pieces.h"

namespace oper {

// The runs of a launch: run r has the sorted accesses start[r] … start[r + 1] - 1.
struct Runs {
  const int32_t* start;
  int count;

  __device__ explicit Runs(const SumArguments& a) {
    const int64_t first = a.groups[a.first_group];
    start = a.run_start + first;
    count = static_cast<int>(a.groups[a.last_group] - first);
  }

  __device__ int64_t begin() const { return start[0]; }
  __device__ int64_t end() const { return start[count]; }
  __device__ bool is_long(int run) const { return start[run + 1] - start[run] > kAccessesPerPiece; }

  // The run that has an access.
  __device__ int of(int64_t access) const { return last_at_most(start, 0, count, access); }

  // From `run`, of accesses [n, run_end), to the first one that is not long, if there is one before
  // access `end`.
  __device__ void skip_long(int& run, int& n, int& run_end, int end) const {
    while (run_end - n > kAccessesPerPiece) {
      n = run_end;
      if (n >= end) return;
      run_end = start[++run + 1];
    }
  }

  // The long run that begins in a window, or -1.
  __device__ int beginning_in(int64_t window) const {
    const int64_t first = begin() + window * kAccessesPerPiece;
    const int64_t last = first + kAccessesPerPiece < end() ? first + kAccessesPerPiece : end();
    const int run = of(last - 1);
    return start[run] >= first && is_long(run) ? run : -1;
  }
};

// Sorted accesses [begin, end).
struct Span {
  int begin = 0;
  int end = 0;
};

// The piece whose sum has a place among the partial sums: empty where none has it. Of the two of a
// window, the first is for a run that began before, the second for one that begins in it.
__device__ __forceinline__ Span piece_of(const Runs& runs, int64_t place) {
  const int64_t window = place / 2, first = runs.begin() + window * kAccessesPerPiece;
  if (place % 2 == 1) {
    const int run = runs.beginning_in(window);
    if (run < 0) return {};
    return {runs.start[run], runs.start[run] + static_cast<int>(kAccessesPerPiece)};
  }
  const int run = runs.of(first);
  const int64_t begin = runs.start[run], end = runs.start[run + 1];
  if (begin == first || !runs.is_long(run)) return {};
  const int64_t number = (first - begin + kAccessesPerPiece - 1) / kAccessesPerPiece;
  const int64_t at = begin + number * kAccessesPerPiece;
  const int64_t next = at + kAccessesPerPiece;
  return {static_cast<int>(at), static_cast<int>(next < end ? next : end)};
}

// Where piece `number` of a long run that begins in a window has its partial sum.
__device__ __forceinline__ int64_t place_of(int64_t window, int64_t number) {
  return 2 * (window + number) + (number == 0);
}

// The feature that an access is of, by its position, or by its bag where accesses go by bag.
__device__ __forceinline__ int feature_of(const SumArguments& a, int64_t number) {
  int found = 0;  // the last that begins there or before
  for (int above = static_cast<int>(a.feature_count); above - found > 1;) {
    const int middle = (found + above) / 2;
    const int64_t first = a.by_bag ? a.features[middle].first_bag : a.segment_offset[middle];
    (first <= number ? found : above) = middle;
  }
  return found;
}

// Where the gradient of each sorted access lies and, kFactors, what it is multiplied by: the
// access's weight, divided by its bag's length for means.
template <bool kFactors>
__global__ void __launch_bounds__(256) find_gradients(const __grid_constant__ SumArguments a) {
  const Runs runs(a);
  if (runs.count <= 0) return;
  const int64_t n = runs.begin() + static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (n >= runs.end()) return;
  const int32_t number = a.positions[n];
  const int found = feature_of(a, number);
  const Feature& feature = a.features[found];
  const bool has_bags = a.offsets32 || a.offsets64;
  const int64_t bag = a.bag_of ? a.bag_of[number] : number;
  const int64_t first_bag = has_bags ? feature.first_bag : a.segment_offset[found];
  a.place[n] = static_cast<uint32_t>(feature.out(bag - first_bag));
  if constexpr (kFactors) {
    float factor = a.weights ? a.weights[number] : 1.0f;
    if (has_bags && feature.mean) {
      const int64_t length = a.offsets32 ? a.offsets32[bag + 1] - a.offsets32[bag]
                                         : a.offsets64[bag + 1] - a.offsets64[bag];
      factor /= static_cast<float>(length);
    }
    a.factor[n] = factor;
  }
}

// A piece of a gradient that lies anywhere.
template <typename Row, int kBytes>
__device__ __forceinline__ Piece<kBytes> load_values(const uint8_t* from) {
  Piece<kBytes> piece;
#pragma unroll
  for (int n = 0; n < Piece<kBytes>::kWords; ++n) {
    if constexpr (kValueBytes<Row> == 4) {
      piece.word[n] = load_row<4>(from + 4 * n).word[0];
    } else {
      piece.word[n] = load_row<2>(from + 4 * n).word[0] | load_row<2>(from + 4 * n + 2).word[0]
                                                              << 16;
    }
  }
  return piece;
}

// The first `count` of some pieces of gradients, that go out together. Features may lie at any
// places in the gradient, which the device alone is told.
template <typename Row, int kBytes, int kAhead>
__device__ __forceinline__ void load_gradients(const uint8_t* const (&from)[kAhead], int count,
                                               Piece<kBytes> (&piece)[kAhead]) {
  constexpr bool kWide = kBytes > kValueBytes<Row>;
  uintptr_t bits = 0;
  if constexpr (kWide) {
#pragma unroll
    for (int u = 0; u < kAhead; ++u) bits |= reinterpret_cast<uintptr_t>(from[u]);
  }
  if (bits % kBytes == 0 || !kWide) {
#pragma unroll
    for (int u = 0; u < kAhead; ++u)
      if (u < count) piece[u] = load_row<kBytes>(from[u]);
  } else if constexpr (kWide) {
#pragma unroll
    for (int u = 0; u < kAhead; ++u)
      if (u < count) piece[u] = load_values<Row, kBytes>(from[u]);
  }
}

// Gradients from a column on of accesses n … n + kAhead - 1, as far as they are before `end`, and
// what they are multiplied by. `place` is where that of access n lies.
template <typename Row, int kBytes, int kAhead>
struct Turn {
  using Values = oper::Values<Row, kBytes>;

  Piece<kBytes> piece[kAhead];
  float factor[kAhead];

  __device__ Turn(const SumArguments& a, int n, int end, uint32_t place, int column) {
    const uint8_t* from[kAhead];
#pragma unroll
    for (int u = 0; u < kAhead; ++u) {
      const int at = n + u < end ? n + u : end - 1;
      const int64_t begin = u == 0 ? place : a.place[at];
      from[u] = a.grad + (begin + column) * kValueBytes<Row>;
      factor[u] = a.factor ? a.factor[at] : 1.0f;
    }
    load_gradients<Row>(from, end - n, piece);
  }

  // Adds that of access n + u to a sum.
  __device__ void add(int u, float (&sum)[Values::kCount]) const {
#pragma unroll
    for (int k = 0; k < Values::kCount; ++k) sum[k] += Values::get(piece[u], k) * factor[u];
  }
};

// kCount values of a sum, times `scale`; they lie at a multiple of 16 bytes if they are as many.
template <int kCount>
__device__ __forceinline__ void store_sum(float* to, const float (&sum)[kCount], float scale) {
  if constexpr (kCount % 4 == 0) {
#pragma unroll
    for (int k = 0; k < kCount; k += 4)
      store<16>(to + k, {{bits_of_float(sum[k] * scale), bits_of_float(sum[k + 1] * scale),
                          bits_of_float(sum[k + 2] * scale), bits_of_float(sum[k + 3] * scale)}});
  } else {
#pragma unroll
    for (int k = 0; k < kCount; ++k) to[k] = sum[k] * scale;
  }
}

constexpr int kMostRuns = 8;  // that threads take at a time: a turn or two of gradients if short

// Threads that hold a gradient together have the columns of blockIdx.y.
template <typename Row, int kBytes, int kLanes, int kAhead>
__global__ void __launch_bounds__(256, 4) sum_runs(const __grid_constant__ SumArguments a) {
  constexpr int kCount = Values<Row, kBytes>::kCount;
  const Runs runs(a);
  const int column =
      (static_cast<int>(blockIdx.y) * kLanes + static_cast<int>(threadIdx.x) % kLanes) * kCount;
  if (runs.count <= 0 || column >= a.dim) return;
  float* const out = a.values ? a.values + a.groups[a.all_groups + 1 + a.first_group] : nullptr;
  const int groups = static_cast<int>(gridDim.x * blockDim.x / kLanes);
  const int shared = runs.count / groups;
  const int at_once = shared < 1 ? 1 : shared < kMostRuns ? shared : kMostRuns;
  const int pieces = static_cast<int>(partial_sums(runs.end() - runs.begin()));
  const int items = pieces + (a.values ? (runs.count + at_once - 1) / at_once : 0);
  // Pieces are the longest work, and begin first.
  int item = static_cast<int>((blockIdx.x * blockDim.x + threadIdx.x) / kLanes);
  for (; item < items; item += groups) {
    // Accesses n on, before `end`: those of `run` end at run_end, and its sum goes to sums[run].
    int n, end, run = 0, run_end;
    float* sums = out;
    if (item < pieces) {
      const Span piece = piece_of(runs, item);
      n = piece.begin;
      end = run_end = piece.end;
      sums = a.partial + item * a.dim;
    } else {
      run = (item - pieces) * at_once;
      end = runs.start[run + at_once < runs.count ? run + at_once : runs.count];
      n = runs.start[run];
      run_end = runs.start[run + 1];
      runs.skip_long(run, n, run_end, end);
    }
    float sum[kCount] = {};
    while (n < end) {
      const Turn<Row, kBytes, kAhead> turn(a, n, end, a.place[n], column);
      const int first = n;
#pragma unroll
      for (int u = 0; u < kAhead; ++u) {
        if (first + u != n || n >= end) continue;  // of a long run, or none
        turn.add(u, sum);
        if (++n < run_end) continue;
        store_sum(sums + run * a.dim + column, sum, item < pieces ? 1.0f : a.scale);
#pragma unroll
        for (int k = 0; k < kCount; ++k) sum[k] = 0.0f;
        if (n >= end) continue;
        run_end = runs.start[++run + 1];
        runs.skip_long(run, n, run_end, end);
      }
    }
  }
}

// Adds the pieces of long runs up, one after the other: a warp takes a window in which a run
// begins. Where no sums are asked for, that of a run takes the place of its first piece.
template <int kBytes, int kAhead>
__global__ void __launch_bounds__(256, 4) add_pieces(const __grid_constant__ SumArguments a) {
  using Values = oper::Values<Float32Row, kBytes>;
  constexpr int kCount = Values::kCount;
  const Runs runs(a);
  if (runs.count <= 0) return;
  float* const out = a.values ? a.values + a.groups[a.all_groups + 1 + a.first_group] : nullptr;
  const int64_t windows = partial_sums(runs.end() - runs.begin()) / 2;
  const int lane = static_cast<int>(threadIdx.x) % kWarpThreads;
  const int64_t warps = static_cast<int64_t>(gridDim.x) * blockDim.x / kWarpThreads;
  const int64_t warp = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) / kWarpThreads;
  for (int64_t window = warp; window < windows; window += warps) {
    const int run = runs.beginning_in(window);
    if (run < 0) continue;
    const int64_t length = runs.start[run + 1] - runs.start[run];
    const int64_t pieces = (length + kAccessesPerPiece - 1) / kAccessesPerPiece;
    float* const sums = out ? out + run * a.dim : a.partial + place_of(window, 0) * a.dim;
    for (int64_t first = lane * kCount; first < a.dim; first += kWarpThreads * kCount) {
      float sum[kCount] = {};
      for (int64_t n = 0; n < pieces; n += kAhead) {
        Piece<kBytes> piece[kAhead];
#pragma unroll
        for (int u = 0; u < kAhead; ++u)
          if (n + u < pieces)
            piece[u] = load<kBytes>(a.partial + place_of(window, n + u) * a.dim + first);
#pragma unroll
        for (int u = 0; u < kAhead; ++u) {
          if (n + u >= pieces) continue;
#pragma unroll
          for (int k = 0; k < kCount; ++k) sum[k] += Values::get(piece[u], k);
        }
      }
      store_sum(sums + first, sum, a.scale);
    }
  }
}

// The bag of each access. The accesses of a block's bags follow each other: each thread takes one
// of them at a time, whatever the bags' lengths, and looks among these bags for its own.
template <typename Offset>
__global__ void __launch_bounds__(256)
    number_bags(const __grid_constant__ SumArguments a, const Offset* offsets) {
  const int64_t first = static_cast<int64_t>(blockIdx.x) * blockDim.x;
  const int64_t last = first + blockDim.x < a.bags ? first + blockDim.x : a.bags;
  const int64_t begin = offsets[first] > 0 ? offsets[first] : 0;
  const int64_t end = offsets[last] < a.accesses ? offsets[last] : a.accesses;
  for (int64_t n = begin + threadIdx.x; n < end; n += blockDim.x) {
    a.bag_of[n] = static_cast<int32_t>(last_at_most(offsets, first, last, n));
  }
}

}  // namespace oper
