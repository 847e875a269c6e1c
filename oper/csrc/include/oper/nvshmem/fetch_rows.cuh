// Distinct rows of other ranks, each brought once into a buffer that is read as one more rank: a
// warp a row. It asks for its rows, one after another, writes the addresses of the accesses that
// read them, and waits for all of them at the end, by one thread; rows of ranks whose memory is
// mapped it copies.
#pragma once

#include "oper/nvshmem/calls.h"
#include "oper/nvshmem/launchers.h"
#include "oper/plan/address.h"

namespace oper {

// Bytes as wide as two places and their size allow, by the threads of a warp.
__device__ __forceinline__ void copy_by_warp(uint8_t* to, const uint8_t* from, int64_t bytes,
                                             int lane) {
  const auto misaligned = reinterpret_cast<uint64_t>(to) | reinterpret_cast<uint64_t>(from) | bytes;
  if (misaligned % 16 == 0) {
    for (int64_t at = 16 * lane; at < bytes; at += 16 * kWarpThreads)
      store(to + at, load_row<16>(from + at));
  } else if (misaligned % 4 == 0) {
    for (int64_t at = 4 * lane; at < bytes; at += 4 * kWarpThreads)
      store(to + at, load_row<4>(from + at));
  } else {
    for (int64_t at = lane; at < bytes; at += kWarpThreads) to[at] = from[at];
  }
}

__global__ void __launch_bounds__(256) fetch_rows(const __grid_constant__ FetchArguments a) {
  if (a.report && a.report->bad_bag != kNothingBad) return;
  const int lane = static_cast<int>(threadIdx.x) % kWarpThreads;
  const int64_t warps = static_cast<int64_t>(gridDim.x) * blockDim.x / kWarpThreads;
  const int64_t mine = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) / kWarpThreads;
  const int64_t codes = a.ranks + 1, row_bytes = a.row_bytes[a.bucket];
  // Where the bucket's rows begin in the buffer, in rows of its size: behind those of the others.
  int64_t first = 0;
  for (int64_t b = 0; b < a.bucket; ++b) {
    const int64_t rows = a.run_count[(b + 1) * codes] - a.run_count[b * codes];
    const int64_t end = (first + rows) * a.row_bytes[b];
    first = (end + a.row_bytes[b + 1] - 1) / a.row_bytes[b + 1];
  }
  const int64_t* const before = a.run_count + a.bucket * codes;
  bool asked = false;
  for (int64_t n = before[0] + mine; n < before[codes]; n += warps) {
    int64_t low = 0, high = a.ranks;  // the last code that begins at n or before it
    while (low < high) {
      const int64_t middle = (low + high + 1) / 2;
      if (before[middle] <= n)
        low = middle;
      else
        high = middle - 1;
    }
    const int64_t owner = low - 1;
    if (owner < 0 || owner == a.rank) continue;  // a replica, or an own row
    const int64_t there = first + n - before[0];
    uint8_t* const to = a.buffer + there * row_bytes;
    const int64_t in_arena = a.slots[n] * row_bytes;
    if (const int64_t arena = a.arenas[owner]) {
      copy_by_warp(to, reinterpret_cast<const uint8_t*>(arena) + in_arena, row_bytes, lane);
    } else {
      nvshmemx_getmem_nbi_warp(to, reinterpret_cast<const uint8_t*>(a.symmetric[owner]) + in_arena,
                               static_cast<size_t>(row_bytes), static_cast<int>(owner));
      asked = true;
    }
    for (int64_t at = a.run_start[n] + lane; at < a.run_start[n + 1]; at += kWarpThreads)
      a.addresses[a.positions[at]] = make_address(a.ranks, there);
  }
  __syncwarp(0xFFFFFFFFu);  // all threads have asked
  if (asked && lane == 0) nvshmem_quiet();
}

}  // namespace oper
