// The sparse AllReduce of the replicas' gradients on the devices of a node (OPER, §5.3), by the
// bitmap method: the sums of the processor's (allreduce/gradient_buffers.h), bit by bit.
//
// A rank marks the replicas that it touched; the union of the ranks' bitmaps numbers the rows that
// are summed, and each rank brings a buffer with a row for each of them, padded with -0.0 where it
// has none. Rank r then sums slice r of all buffers, in the order of ranks, and all gather the
// slices from those that summed them: the volume of a ring, in two hops that load all links alike,
// where one result for all would have its owner's link serve everyone. How many rows there are is
// known on the devices alone: grids are as large as capacities ask for. Nothing is added by atomics
// but bits, whose order does not matter.
#pragma once

#include "oper/common/bits.h"
#include "oper/cuda/listed_rows.cuh"
#include "oper/cuda/replica_rows.cuh"
#include "oper/step/gradient_layout.h"

namespace oper {

// A thread takes a row, of the bucket blockIdx.y. A slot that is no replica's, which the processor
// refuses, is passed over: the host cannot be told without a wait.
__global__ void __launch_bounds__(256) mark_replicas(const __grid_constant__ MarkArguments a) {
  const int64_t bucket = blockIdx.y;
  if (a.count[bucket] == 0) return;
  const int64_t threads = static_cast<int64_t>(gridDim.x) * blockDim.x;
  const int64_t begin = a.before[a.group[bucket]], end = a.before[a.group[bucket] + 1];
  for (int64_t n = begin + static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; n < end;
       n += threads) {
    const int64_t number = number_at(a, bucket, a.rows[n]);
    if (number >= 0) atomicOr(a.bitmap + a.first_word[bucket] + number / 64, 1ull << (number % 64));
  }
}

// A warp takes a tile of words. The bits of each tile are counted here, to be added up by
// scan_tiles.
__global__ void __launch_bounds__(256) unite_words(const __grid_constant__ UnionArguments a) {
  const int lane = static_cast<int>(threadIdx.x) % kWarpThreads;
  const int64_t tile = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) / kWarpThreads;
  const int64_t begin = tile * kTileWords;
  if (begin >= a.words) return;
  int64_t before = 0;
  for (int64_t part = begin; part < begin + kTileWords; part += kWarpThreads) {
    const int64_t word = part + lane;
    uint64_t bits = 0;
    if (word < a.words)
      for (int64_t rank = 0; rank < a.ranks; ++rank) bits |= a.bitmaps[rank][word];
    const int of_word = set_bits(bits);
    const int64_t through = sum_to_lane(of_word, lane);
    if (word < a.words) {
      a.united[word] = bits;
      a.in_tile[word] = static_cast<int32_t>(before + through - of_word);
    }
    before += __shfl_sync(0xFFFFFFFFu, through, kWarpThreads - 1);
  }
  if (lane == 0) a.tile_begin[tile + 1] = before;
}

// One warp: the bits before each tile, from those of each.
__global__ void __launch_bounds__(32) scan_tiles(const __grid_constant__ UnionArguments a) {
  constexpr int kOfLane = 8;
  const int lane = static_cast<int>(threadIdx.x);
  const int64_t tiles = (a.words + kTileWords - 1) / kTileWords;
  int64_t before = 0;
  if (lane == 0) a.tile_begin[0] = 0;
  for (int64_t part = 0; part < tiles; part += kOfLane * kWarpThreads) {
    int64_t* const mine = a.tile_begin + 1 + part + kOfLane * lane;
    const int64_t left = tiles - part - kOfLane * lane;
    int64_t value[kOfLane], sum = 0;
#pragma unroll
    for (int n = 0; n < kOfLane; ++n) value[n] = n < left ? mine[n] : 0;
#pragma unroll
    for (int n = 0; n < kOfLane; ++n) sum += value[n];
    const int64_t through = sum_to_lane(sum, lane);
    int64_t next = before + through - sum;
#pragma unroll
    for (int n = 0; n < kOfLane; ++n) {
      next += value[n];
      if (n < left) mine[n] = next;
    }
    before += __shfl_sync(0xFFFFFFFFu, through, kWarpThreads - 1);
  }
}

// The replicas that are set before a word; those of all words before the last one's end.
__device__ __forceinline__ int64_t rows_before(const ListArguments& a, int64_t word) {
  const int64_t tiles = (a.words + kTileWords - 1) / kTileWords;
  return word < a.words ? a.tile_begin[word / kTileWords] + a.in_tile[word] : a.tile_begin[tiles];
}

// A thread lists the replicas of a word, or counts those before a bucket.
__global__ void __launch_bounds__(256) list_replicas(const __grid_constant__ ListArguments a) {
  const int64_t threads = static_cast<int64_t>(gridDim.x) * blockDim.x;
  const int64_t thread = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  for (int64_t word = a.first_word[0] + thread; word < a.first_word[a.buckets]; word += threads) {
    uint64_t bits = a.united[word];
    if (bits == 0) continue;
    const int64_t bucket = last_at_most(a.first_word, 0, a.buckets, word);
    const int64_t first = 64 * (word - a.first_word[bucket]);
    const int64_t* const slots = a.slots[bucket];
    for (int64_t row = rows_before(a, word); bits; bits &= bits - 1, ++row) {
      const int64_t number = first + lowest_bit(bits);
      a.rows[row] = slots ? slots[number] : number;
    }
  }
  if (thread <= a.buckets) a.before[thread] = rows_before(a, a.first_word[thread]);
}

__global__ void __launch_bounds__(256)
    aggregate_rows(const __grid_constant__ AggregateArguments a) {
  const int64_t bucket = blockIdx.y;
  const int lanes = a.lanes[bucket], dim = static_cast<int>(a.dim[bucket]);
  const ListedRows own = rows_of(a.own[bucket]), united = rows_of(a.united[bucket]);
  float* const out = a.out + (united.values - a.united[bucket].values);
  for_rows(united.count, lanes, [&](int64_t row, int lane) {
    const int entry = find_slot(own, united.slots[row]);
    const float* const from = entry < 0 ? nullptr : own.values + static_cast<int64_t>(entry) * dim;
    write_row(a.wide[bucket], from, out + row * dim, dim, lane, lanes);
  });
}

// Slices of a buffer's values, one of each rank, in whole lines.
struct Slices {
  int64_t size;
  int64_t step;

  __device__ Slices(int64_t size, int64_t ranks) : size(size) {
    const int64_t lines = (size + kLineValues - 1) / kLineValues;
    step = (lines + ranks - 1) / ranks * kLineValues;
  }
  __device__ explicit Slices(const SliceArguments& a)
      : Slices(a.groups[2 * a.buckets + 1], a.ranks) {}

  __device__ int64_t begin(int64_t rank) const { return step * rank < size ? step * rank : size; }
};

// The bytes of a step that a rank reads of others' buffers, as the processor charges them: without
// what lies between buckets here.
__device__ __forceinline__ int64_t bytes_read(const SliceArguments& a) {
  int64_t size = 0;
#pragma unroll 1
  for (int64_t b = 0; b < a.buckets; ++b) size += (a.groups[b + 1] - a.groups[b]) * a.dims[b];
  const Slices slices(size, a.ranks);
  const int64_t mine = slices.begin(a.rank + 1) - slices.begin(a.rank);
  return static_cast<int64_t>(sizeof(float)) * ((a.ranks - 1) * mine + size - mine);
}

constexpr int kOfThread = 4;  // values; buffers begin at multiples of sixteen bytes

// `out` may be the rank's own buffer: nobody else reads its slice of that.
__global__ void __launch_bounds__(256, 4) sum_slice(const __grid_constant__ SliceArguments a) {
  const auto ranks = static_cast<int>(a.ranks);
  const Slices slices(a);
  const int64_t begin = slices.begin(a.rank), end = slices.begin(a.rank + 1);
  const int64_t threads = static_cast<int64_t>(gridDim.x) * blockDim.x;
  const int64_t thread = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (thread == 0) *a.read += bytes_read(a);
  // Beyond the end lies the rest of a line, which buffers have.
  for (int64_t n = begin + kOfThread * thread; n < end; n += kOfThread * threads) {
    auto sum = load<4 * kOfThread>(a.parts[0] + n);
#pragma unroll 4
    for (int rank = 1; rank < ranks; ++rank) {
      const auto more = load<4 * kOfThread>(a.parts[rank] + n);
#pragma unroll
      for (int k = 0; k < kOfThread; ++k)
        sum.word[k] = bits_of_float(float_of_bits(sum.word[k]) + float_of_bits(more.word[k]));
    }
    store(a.out + n, sum);
  }
}

// The sum of buffers at any places, in their order.
__global__ void __launch_bounds__(256) add_buffers(const __grid_constant__ BufferArguments a) {
  const int64_t n = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (n >= a.values) return;
  float sum = a.parts[0][n];
  for (int64_t part = 1; part < a.count; ++part) sum += a.parts[part][n];
  a.out[n] = sum;
}

// `out` may be one of the parts. Its own slice stays as it is, because others read it meanwhile.
__global__ void __launch_bounds__(256) gather_slices(const __grid_constant__ SliceArguments a) {
  const Slices slices(a);
  const int64_t threads = static_cast<int64_t>(gridDim.x) * blockDim.x;
  const int64_t thread = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  for (int64_t n = kOfThread * thread; n < slices.size; n += kOfThread * threads) {
    const float* const from = a.parts[n / slices.step];
    if (from != a.out) store(a.out + n, load<4 * kOfThread>(from + n));
  }
}

// A thread takes a replica, of the bucket blockIdx.y, in a sum of all of them. A row that any rank
// touched begins with another value than padding (allreduce/gradient_buffers.h), and so does the
// sum of such rows: x + y is -0.0 only if both are.
__global__ void __launch_bounds__(256) mark_touched(const __grid_constant__ TouchedArguments a) {
  const int64_t bucket = blockIdx.y, dim = a.dim[bucket];
  const float* const values = a.values + a.groups[a.all + 1 + a.first + bucket];
  unsigned long long* const bitmap = a.bitmap + a.first_word[bucket];
  const int64_t threads = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t n = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; n < a.count[bucket];
       n += threads)
    if (bits_of_float(values[n * dim]) != bits_of_float(kPadding))
      atomicOr(bitmap + n / 64, 1ull << (n % 64));
}

}  // namespace oper
