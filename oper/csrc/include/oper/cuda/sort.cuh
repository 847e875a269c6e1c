// What the sort of a batch's accesses by row does on a device beside sorting: the words that are
// sorted, and the runs of equal rows among them once they are. The CPU's is step/sort.h.
//
// Words are made from what the host knows without a look at the batch: a row is told by its group
// and its slot, in fields as wide as the arenas need. No thread waits for another.
#pragma once

#include "oper/cuda/device.h"
#include "oper/cuda/launchers.h"
#include "oper/cuda/search.cuh"
#include "oper/plan/address.h"

namespace oper {

constexpr int64_t kStrip = 8 * kWarpThreads;  // accesses of a warp: 8 of each thread

// The group of an address's row, or that of no row.
__device__ __forceinline__ int64_t group_of(const WordArguments& a, int64_t bucket,
                                            int64_t address) {
  const int64_t field = field_of(address);
  const int64_t code = field == kReplica ? 0 : 1 + (field == kLocal ? a.rank : field);
  const bool is_row =
      bucket >= 0 && field >= 0 && code <= a.ranks && slot_of(address) >> a.layout.slot_bits == 0;
  return is_row ? bucket * (1 + a.ranks) + code : a.layout.groups;
}

// The words of the accesses of a launch's features. Those of frozen tables, of addresses that name
// no row, and of a batch with a bad bag or a fatal id, are of no group. A warp takes a strip of
// accesses, whose features and bags are looked for between those of its first and its last:
// `offsets` null, an access is called by its position, else by its bag.
template <typename Offset>
__global__ void __launch_bounds__(256)
    make_words(const __grid_constant__ WordArguments a, const Offset* offsets) {
  const int64_t threads = static_cast<int64_t>(gridDim.x) * blockDim.x;
  const int64_t thread = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const auto write = [&](int64_t at, int64_t group, int64_t slot, int64_t number) {
    a.words[at] = a.layout.word(group, slot, a.numbers ? 0 : number);
    if (a.numbers) a.numbers[at] = static_cast<int32_t>(number);
  };
  if (a.report &&
      (a.report->bad_bag != kNothingBad || (a.bad_ids_too && a.report->bad_id != kNothingBad))) {
    for (int64_t n = thread; n < a.accesses; n += threads) write(n, a.layout.groups, 0, 0);
    return;
  }
  const int64_t begin = a.segment_offset[0], end = a.segment_offset[a.features];
  const int64_t lane = thread % kWarpThreads;
  for (int64_t strip = begin + thread / kWarpThreads * kStrip; strip < end;
       strip += threads / kWarpThreads * kStrip) {
    const int64_t last = (strip + kStrip < end ? strip + kStrip : end) - 1;
    const int64_t feature = last_at_most(a.segment_offset, 0, a.features, strip);
    const int64_t last_feature = last_at_most(a.segment_offset, feature, a.features, last);
    int64_t bag = 0, last_bag = 0;
    if (offsets) {
      bag = last_at_most(offsets, 0, a.bags, strip);
      last_bag = last_at_most(offsets, bag, a.bags, last);
    }
    for (int64_t n = strip + lane; n <= last; n += kWarpThreads) {
      const int64_t address = a.addresses[n];
      const int64_t of = last_at_most(a.segment_offset, feature, last_feature + 1, n);
      const int64_t number = offsets ? last_at_most(offsets, bag, last_bag + 1, n) : n;
      const int64_t group = group_of(a, a.bucket[of], address);
      write(n, group, group < a.layout.groups ? slot_of(address) : 0, number);
    }
  }
}

// Of words that are sorted, which are the first of a run.
struct StartsRun {
  const uint64_t* words;
  int32_t number_bits;

  OPER_HD bool operator()(int32_t n) const {
    return n == 0 || words[n] >> number_bits != words[n - 1] >> number_bits;
  }
};

// From sorted words and the places where runs start: numbers, slots, and the runs before each
// group. What is of no group is one run, the last, which becomes the end of the others.
__global__ void __launch_bounds__(256) find_runs(const __grid_constant__ RunArguments a) {
  const int64_t threads = static_cast<int64_t>(gridDim.x) * blockDim.x;
  const int64_t runs = *a.runs;
  for (int64_t n = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
       n < a.accesses || n <= a.layout.groups; n += threads) {
    if (n == 0) a.run_start[runs] = static_cast<int32_t>(a.accesses);
    if (n < a.accesses && a.positions) a.positions[n] = a.layout.number_of(a.words[n]);
    if (n < runs) a.run_slot[n] = a.layout.slot_of(a.words[a.run_start[n]]);
    if (n <= a.layout.groups) {
      const uint64_t first = a.layout.word(n, 0, 0);
      int64_t low = 0, high = runs;  // the first run whose word is no less
      while (low < high) {
        const int64_t middle = (low + high) / 2;
        if (a.words[a.run_start[middle]] < first)
          low = middle + 1;
        else
          high = middle;
      }
      a.before[n] = low;
    }
  }
}

}  // namespace oper
