// How many of a batch's accesses read from each rank, on a device: a warp takes pieces of a
// feature's addresses, and looks through each once for each rank. Integers are added in any order.
#pragma once

#include "oper/cuda/device.h"
#include "oper/cuda/launchers.h"
#include "oper/plan/address.h"

namespace oper {

constexpr int kAddresses = 8;  // that a thread holds

__global__ void __launch_bounds__(256) accesses_by_rank(const __grid_constant__ CountArguments a) {
  if (a.report && a.report->bad_bag != kNothingBad) return;
  constexpr int64_t kPiece = kWarpThreads * kAddresses;
  const int64_t warps = static_cast<int64_t>(gridDim.x) * blockDim.x / kWarpThreads;
  const int64_t warp = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) / kWarpThreads;
  const int lane = static_cast<int>(threadIdx.x) % kWarpThreads;
  const int64_t begin = a.segment_offset[blockIdx.y], end = a.segment_offset[blockIdx.y + 1];
  int64_t* const counts = a.counts + a.bucket[blockIdx.y] * (a.ranks + 1);
  for (int64_t first = begin + warp * kPiece; first < end; first += warps * kPiece) {
    int64_t field[kAddresses];
#pragma unroll
    for (int n = 0; n < kAddresses; ++n) {
      const int64_t at = first + n * kWarpThreads + lane;
      field[n] = at < end ? field_of(a.addresses[at]) : -1;
    }
    for (int64_t code = 0; code <= a.ranks; ++code) {
      const int64_t wanted = code == 0 ? kReplica : code - 1 == a.rank ? kLocal : code - 1;
      int found = 0;
#pragma unroll
      for (int n = 0; n < kAddresses; ++n) found += field[n] == wanted;
      for (int step = kWarpThreads / 2; step > 0; step /= 2)
        found += __shfl_xor_sync(0xFFFFFFFFu, found, step);
      if (lane == 0 && found > 0)
        atomicAdd(reinterpret_cast<unsigned long long*>(counts + code),
                  static_cast<unsigned long long>(found));
    }
  }
}

}  // namespace oper
