// Parts that the kernels of the replicas' AllReduce share (replica_sums.cuh, replica_messages.cuh):
// launches, and rows that are found and written.
#pragma once

#include <algorithm>

#include "oper/allreduce/gradient_buffers.h"
#include "oper/cuda/device.h"
#include "oper/cuda/launchers.h"
#include "oper/cuda/search.cuh"

namespace oper {

// Starts a kernel with the blocks that so many threads of each bucket need, and at most those that
// a device holds at once; without threads or buckets no kernel.
template <typename Arguments>
cudaError_t launch_threads(void (*kernel)(Arguments), const Arguments& a, int64_t threads,
                           int64_t buckets, void* stream) {
  constexpr unsigned kThreads = 256;
  if (threads == 0 || buckets == 0) return cudaSuccess;
  const int64_t needed = (threads + kThreads - 1) / kThreads;
  const int64_t blocks = std::min(needed, blocks_at_once(kernel, kThreads));
  return launch({dim3(static_cast<unsigned>(blocks), static_cast<unsigned>(buckets)), kThreads,
                 static_cast<cudaStream_t>(stream)},
                kernel, a);
}

// Starts a kernel with the threads that hold `most_rows` rows of each bucket.
template <typename Arguments>
cudaError_t launch_rows(void (*kernel)(Arguments), const Arguments& a, int64_t most_rows,
                        void* stream) {
  const int32_t* const lanes = std::max_element(a.lanes, a.lanes + a.buckets);
  return launch_threads(kernel, a, most_rows * *lanes, a.buckets, stream);
}

// Calls f(row, lane) for the rows of a thread, of `count` rows that `lanes` threads each hold
// together.
template <typename F>
__device__ __forceinline__ void for_rows(int64_t count, int lanes, const F& f) {
  const auto thread = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const auto rows_at_once = static_cast<int64_t>(gridDim.x) * blockDim.x / lanes;
  const int lane = static_cast<int>(thread % lanes);
  for (int64_t row = thread / lanes; row < count; row += rows_at_once) f(row, lane);
}

// The number of the replica at a slot; -1 where none is.
__device__ __forceinline__ int64_t number_at(const ReplicaBuckets& a, int64_t bucket,
                                             int64_t slot) {
  const int64_t count = a.count[bucket];
  if (!a.slots[bucket]) return slot >= 0 && slot < count ? slot : -1;
  const int64_t number = last_at_most(a.slots[bucket], 0, count, slot);
  return a.slots[bucket][number] == slot ? number : -1;
}

// The sum over the lanes of a warp up to each.
__device__ __forceinline__ int64_t sum_to_lane(int64_t value, int lane) {
  for (int step = 1; step < kWarpThreads; step *= 2) {
    const int64_t before = __shfl_sync(0xFFFFFFFFu, value, lane < step ? lane : lane - step);
    if (lane >= step) value += before;
  }
  return value;
}

// Threads that hold a row together write it, or padding if `from` is null. The first value of the
// row has +0.0 added, which tells it from padding, as on the processor.
template <int kCount>
__device__ __forceinline__ void write_row(const float* from, float* to, int dim, int lane,
                                          int lanes) {
  for (int d = lane * kCount; d < dim; d += lanes * kCount) {
    Piece<4 * kCount> piece;
    if (from) {
      piece = load<4 * kCount>(from + d);
      if (d == 0) piece.word[0] = bits_of_float(float_of_bits(piece.word[0]) + 0.0f);
    } else {
#pragma unroll
      for (int k = 0; k < kCount; ++k) piece.word[k] = bits_of_float(kPadding);
    }
    store(to + d, piece);
  }
}

// Writes a row by four values at once if `wide`.
__device__ __forceinline__ void write_row(bool wide, const float* from, float* to, int dim,
                                          int lane, int lanes) {
  if (wide)
    write_row<4>(from, to, dim, lane, lanes);
  else
    write_row<1>(from, to, dim, lane, lanes);
}

}  // namespace oper
