// The gradients of the rows of two lists as one on a device, where the second's are added to the
// first's: those that are held, and a batch's (gradient accumulation). The processor's merge, bit
// by bit (step/merge_gradients.h).
//
// A row's place among all is counted: the rows of the first list before it, and the rows of the
// second before it that the first has not, which are called new. So
// 1. match_rows: every row is looked for in the other list; a warp counts the new ones of a strip;
// 2. count_rows: one block adds up the strips, and from the counts come the groups;
// 3. place_rows: each row writes its slot to its place, and where its gradients are;
// 4. add_rows: a sum has one or two gradients, and threads take four values of any sums.
// Nothing depends on which threads come first, and a value is written once.
#pragma once

#include "oper/cuda/device.h"
#include "oper/cuda/launchers.h"
#include "oper/cuda/lay_out_gradients.cuh"
#include "oper/cuda/search.cuh"
#include "oper/step/row_formats.h"

namespace oper {

constexpr int64_t kSumValues = 4;  // that a thread takes at once
constexpr int kSumsAhead = 2;      // so often before it adds
constexpr int kCountThreads = kCountWarps * kWarpThreads;
static_assert(kCountWarps == kWarpThreads, "a warp adds up what warps have");

__device__ __forceinline__ int64_t groups_of(const MergeArguments& a) {
  return a.dims.buckets * a.dims.of_bucket;
}

// A row's place in a list, as match_rows keeps it: that of the first row that is not below it, in
// the row's group, and whether it is the row itself.
struct PlaceInList {
  int32_t at;
  bool found;

  __device__ explicit PlaceInList(int32_t kept) : at(kept < 0 ? ~kept : kept), found(kept < 0) {}
  __device__ static int32_t kept(int64_t at, bool found) {
    return static_cast<int32_t>(found ? ~at : at);
  }
};

// The new rows before row `n` of the second list.
__device__ __forceinline__ int64_t new_before(const MergeArguments& a, int64_t n) {
  return a.new_in_strips[n / kMergeStrip] + a.new_in_strip[n];
}

// A warp takes a strip of one of the lists, whose groups are looked for between those of its first
// row and of its last.
__global__ void __launch_bounds__(256, 4) match_rows(const __grid_constant__ MergeArguments a) {
  const bool second = blockIdx.y == 1;
  const MergeList &own = a.list[blockIdx.y], &other = a.list[1 - blockIdx.y];
  const int64_t groups = groups_of(a), rows = own.groups[groups];
  const int64_t strip =
      (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) / kWarpThreads;
  const int64_t begin = strip * kMergeStrip, lane = threadIdx.x % kWarpThreads;
  if (begin > rows) return;  // the end has a place too
  const int64_t last = begin + kMergeStrip < rows ? begin + kMergeStrip : rows;
  const int64_t group = last_at_most(own.groups, 0, groups, begin);
  const int64_t last_group = last_at_most(own.groups, group, groups, last - 1);
  int32_t fresh = 0;
  for (int64_t first = begin; first < begin + kMergeStrip; first += kWarpThreads) {
    const int64_t n = first + lane;
    bool is_new = false;
    if (n < rows) {
      const int64_t of = last_at_most(own.groups, group, last_group + 1, n);
      const int64_t slot = own.slots[n], end = other.groups[of + 1];
      int64_t at = other.groups[of];
      for (int64_t high = end; at < high;) {
        const int64_t middle = (at + high) / 2;
        if (other.slots[middle] < slot)
          at = middle + 1;
        else
          high = middle;
      }
      const bool found = at < end && other.slots[at] == slot;
      own.place[n] = PlaceInList::kept(at, found);
      is_new = !found;
    }
    if (!second) continue;
    const uint32_t those = __ballot_sync(0xFFFFFFFFu, is_new);
    if (n <= rows) a.new_in_strip[n] = fresh + __builtin_popcount(those & ((1u << lane) - 1));
    fresh += __builtin_popcount(those);
  }
  if (second && lane == 0) a.new_in_strips[strip] = fresh;
}

// One block: the new rows before each strip, in the place of those in it, and then the groups.
// Warps take ranges of strips, add them up each for itself, and then what warps before have.
__global__ void __launch_bounds__(kCountThreads, 1)
    count_rows(const __grid_constant__ MergeArguments a) {
  const int64_t groups = groups_of(a);
  const int lane = static_cast<int>(threadIdx.x) % kWarpThreads;
  const int warp = static_cast<int>(threadIdx.x) / kWarpThreads;
  const int64_t strips = a.list[1].groups[groups] / kMergeStrip + 1;
  const int64_t turns = (strips + kCountThreads - 1) / kCountThreads;
  const int64_t begin = warp * turns * kWarpThreads + lane;
  const int64_t stop = begin + turns * kWarpThreads, end = stop < strips ? stop : strips;
  int32_t before = 0;
  for (int64_t turn = 0, strip = begin; turn < turns; ++turn, strip += kWarpThreads) {
    const int32_t own = strip < end ? a.new_in_strips[strip] : 0;
    int32_t sum = own;  // of this thread's and those of lower number
    for (int below = 1; below < kWarpThreads; below *= 2) {
      const int32_t more = __shfl_sync(0xFFFFFFFFu, sum, lane < below ? lane : lane - below);
      if (lane >= below) sum += more;
    }
    if (strip < end) a.new_in_strips[strip] = before + sum - own;
    before += __shfl_sync(0xFFFFFFFFu, sum, kWarpThreads - 1);
  }
  if (lane == 0) a.new_in_warps[warp] = before;
  __syncthreads();
  before = lane < warp ? a.new_in_warps[lane] : 0;
  for (int half = kWarpThreads / 2; half > 0; half /= 2)
    before += __shfl_xor_sync(0xFFFFFFFFu, before, half);
  for (int64_t strip = begin; strip < end; strip += kWarpThreads) a.new_in_strips[strip] += before;
  __syncthreads();
  for (int64_t group = threadIdx.x; group <= groups; group += kCountThreads)
    a.groups[group] = a.list[0].groups[group] + new_before(a, a.list[1].groups[group]);
  __syncthreads();
  for (int64_t bucket = warp; bucket < a.dims.buckets; bucket += kCountWarps)
    place_bucket(a.groups, a.dims, bucket, a.groups + groups + 1);
}

// A thread takes a row of one of the lists: those of the second that are not new leave it to the
// first's.
__global__ void __launch_bounds__(256) place_rows(const __grid_constant__ MergeArguments a) {
  const MergeList& own = a.list[blockIdx.y];
  const int64_t rows = own.groups[groups_of(a)];
  const int64_t n = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (n >= rows) return;
  const PlaceInList other(own.place[n]);
  const auto entry = static_cast<int32_t>(n);
  if (blockIdx.y == 0) {
    const int64_t place = n + new_before(a, other.at);
    a.slots[place] = own.slots[n];
    a.sources[place] = {{entry, other.found ? other.at : -1}};
  } else if (!other.found) {
    const int64_t place = other.at + new_before(a, n);
    a.slots[place] = own.slots[n];
    a.sources[place] = {{-1, entry}};
  }
}

// A bucket's sums, and the gradients they are of, which lie one after another in each list too.
struct BucketSums {
  int64_t dim, rows;
  const SumSource* sources;  // of its rows
  int64_t first_value;       // of `values`
  int64_t gradients[2];      // where row 0 of each list would have its gradient, in list.values

  // The bucket that has value number `value` of all sums.
  __device__ BucketSums(const MergeArguments& a, int64_t value) {
    const int64_t groups = groups_of(a), of_bucket = a.dims.of_bucket;
    int64_t bucket = 0;
    for (int64_t high = a.dims.buckets; high - bucket > 1;) {
      const int64_t middle = (bucket + high) / 2;
      (a.groups[groups + 1 + middle * of_bucket] <= value ? bucket : high) = middle;
    }
    const int64_t group = bucket * of_bucket;
    dim = a.dims.dim[bucket];
    rows = a.groups[group + of_bucket] - a.groups[group];
    sources = a.sources + a.groups[group];
    first_value = a.groups[groups + 1 + group];
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const int64_t* const of_list = a.list[n].groups;
      gradients[n] = of_list[groups + 1 + group] - of_list[group] * dim;
    }
  }

  // The row that has a value, counted from the bucket's first on; divided by 32 bits where they
  // suffice, which takes a fraction of the time.
  __device__ int64_t row_of(int64_t value) const {
    const int64_t number = value - first_value;
    return number >> 32 ? number / dim : static_cast<uint32_t>(number) / static_cast<uint32_t>(dim);
  }
};

// Adds up to kSumValues values that lie anywhere, one after another; they may be of several rows,
// or behind the bucket's last.
__device__ __forceinline__ void add_values(const MergeArguments& a, const BucketSums& bucket,
                                           int64_t row, int64_t first) {
  int64_t d = first - bucket.first_value - row * bucket.dim;
  for (int64_t value = first; value < first + kSumValues && row < bucket.rows; ++value) {
    const SumSource source = bucket.sources[row];
    float sum = 0;
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      if (source.row[n] < 0) continue;
      const float more = a.list[n].values[bucket.gradients[n] + source.row[n] * bucket.dim + d];
      sum = n == 1 && source.row[0] >= 0 ? sum + more : more;
    }
    a.values[value] = sum;
    if (++d == bucket.dim) d = 0, ++row;
  }
}

// The sums. Values of one row that can be read at once are read kSumsAhead times before they are
// added.
__global__ void __launch_bounds__(256, 4) add_rows(const __grid_constant__ MergeArguments a) {
  constexpr int kBytes = kSumValues * sizeof(float);
  const int64_t groups = groups_of(a), values = a.groups[2 * groups + 1];
  const int64_t threads = static_cast<int64_t>(gridDim.x) * blockDim.x;
  const int64_t thread = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  for (int64_t turn = thread * kSumValues; turn < values;
       turn += kSumsAhead * threads * kSumValues) {
    const float* from[kSumsAhead][2] = {};
    Piece<kBytes> piece[kSumsAhead][2] = {};
#pragma unroll
    for (int u = 0; u < kSumsAhead; ++u) {
      const int64_t value = turn + u * threads * kSumValues;
      if (value >= values) continue;
      const BucketSums bucket(a, value);
      const int64_t row = bucket.row_of(value), d = value - bucket.first_value - row * bucket.dim;
      if (row >= bucket.rows) continue;
      const SumSource source = bucket.sources[row];
      bool at_once = bucket.dim % kSumValues == 0;
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        if (source.row[n] < 0) continue;
        from[u][n] = a.list[n].values + bucket.gradients[n] + source.row[n] * bucket.dim + d;
        at_once &= reinterpret_cast<uintptr_t>(from[u][n]) % kBytes == 0;
      }
      if (at_once) continue;
      add_values(a, bucket, row, value);
      from[u][0] = from[u][1] = nullptr;
    }
#pragma unroll
    for (int u = 0; u < kSumsAhead; ++u)
#pragma unroll
      for (int n = 0; n < 2; ++n)
        if (from[u][n])
          piece[u][n] = load_row<kBytes>(reinterpret_cast<const uint8_t*>(from[u][n]));
#pragma unroll
    for (int u = 0; u < kSumsAhead; ++u) {
      if (!from[u][0] && !from[u][1]) continue;
      Piece<kBytes> sum;
#pragma unroll
      for (int k = 0; k < kSumValues; ++k) {
        const uint32_t first = piece[u][0].word[k], second = piece[u][1].word[k];
        const uint32_t both = bits_of_float(float_of_bits(first) + float_of_bits(second));
        sum.word[k] = !from[u][0] ? second : !from[u][1] ? first : both;
      }
      store(a.values + turn + u * threads * kSumValues, sum);
    }
  }
}

}  // namespace oper
