// The source of rows of a lookup whose ranks are of several nodes (OPER, USENIX ATC 2024, §5: the
// kernel itself retrieves rows, wherever they lie). Own rows, replicas and those of ranks whose
// memory is mapped have pointers; the others are asked for by NVSHMEM, and come into a stage that
// belongs to the group of threads that wants them.
//
// A group asks for up to `chunk` rows of a bag before it waits for them all at once, each thread
// for rows of its own, so that the requests of a warp go out together. Threads ask by themselves
// and not as a warp, because the groups of a warp have unlike bags. What comes during a launch is
// never read through the cache for what stays as it is, nor from what another chunk left in one.
#pragma once

#include "oper/cuda/lookup.cuh"
#include "oper/nvshmem/calls.h"
#include "oper/nvshmem/launchers.h"

namespace oper {

// Asks for the rows of accesses [n, to) that have no pointer, and waits until all those are there
// that the group asked for: one of its threads waits for all, because a wait of NVSHMEM's looks
// through all queues of this rank. A function of its own, so that NVSHMEM's calls take no registers
// of the sums.
#if defined(__CUDACC__)
static __device__ __noinline__ void
#else
inline void
#endif
get_rows(const GetArguments& a, int64_t n, int64_t to, uint8_t* stage, int lane, int lanes,
         uint32_t mask) {
  const Bases bases{a.arenas, a.ranks, a.rank};
  bool asked = false;
  for (int64_t at = n + lane; at < to; at += lanes) {
    const int64_t address = a.addresses[at];
    if (bases.arena(0, address)) continue;
    const int64_t owner = field_of(address);
    const auto* const arena = reinterpret_cast<const uint8_t*>(a.symmetric[owner]);
    nvshmem_getmem_nbi(stage + (at - n) * a.row_bytes, arena + slot_of(address) * a.row_bytes,
                       static_cast<size_t>(a.row_bytes), static_cast<int>(owner));
    asked = true;
  }
  const bool any_asked = __ballot_sync(mask, asked) != 0;
  __syncwarp(mask);  // all threads of the group have asked
  if (any_asked && lane == 0) nvshmem_quiet();
  __syncwarp(mask);  // what any of them asked for is there
}

struct Gets {
  using Arguments = GetArguments;
  static constexpr bool kGets = true;
  // With three, ptxas spills registers; two have as many reads on their way as memory needs.
  static constexpr int kBlocks = 2;
  const Arguments& a;
  uint8_t* const stage;
  const int lane, lanes;
  const uint32_t mask;  // of the group
  int64_t from = 0;     // the access whose row is the stage's first

  __device__ Gets(const Arguments& a, int64_t group, int lane, int lanes)
      : a(a),
        stage(a.stage + group * a.chunk * a.row_bytes),
        lane(lane),
        lanes(lanes),
        mask(static_cast<uint32_t>((uint64_t{1} << lanes) - 1)
             << (threadIdx.x % kWarpThreads / lanes * lanes)) {}

  // `is_there`: a bag's accesses from n on were brought before, unless others came after them.
  __device__ int64_t bring(int64_t n, int64_t end, bool is_there) {
    if (is_there && end - n <= a.chunk) return end;
    __syncwarp(mask);  // all threads of the group have read what the stage held before
    from = n;
    const int64_t to = end - n < a.chunk ? end : n + a.chunk;
    get_rows(a, n, to, stage, lane, lanes, mask);
    return to;
  }

  template <int kRows, typename Number, typename There>
  __device__ __forceinline__ void find(const Number& number, const There& there,
                                       const uint8_t* (&row)[kRows]) const {
    int64_t address[kRows];
#pragma unroll
    for (int u = 0; u < kRows; ++u)
      address[u] = there(u) ? a.addresses[number(u)] : kLocal << kSlotBits;
    const Bases bases{a.arenas, a.ranks, a.rank};
#pragma unroll
    for (int u = 0; u < kRows; ++u) {
      const uint8_t* const arena = bases.arena(0, address[u]);
      row[u] = arena ? arena + slot_of(address[u]) * a.row_bytes
                     : stage + (number(u) - from) * a.row_bytes;
    }
  }

  template <int kBytes>
  __device__ static Piece<kBytes> load(const uint8_t* place) {
    return load_arrived<kBytes>(place);
  }
};

}  // namespace oper
