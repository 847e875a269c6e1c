// Whether the offsets of a batch ascend from 0 to the number of its values, on a device: a thread a
// bag. The kernels that read by them run after it, and read nothing where they do not.
#pragma once

#include "oper/cuda/device.h"
#include "oper/cuda/launchers.h"

namespace oper {

template <typename Offset>
__global__ void __launch_bounds__(256)
    check_bags(const __grid_constant__ BagArguments a, const Offset* offsets) {
  const int64_t threads = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t bag = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; bag < a.bags;
       bag += threads) {
    const int64_t begin = offsets[bag], end = offsets[bag + 1];
    const bool fits =
        begin <= end && (bag > 0 || begin == 0) && (bag + 1 < a.bags || end == a.values);
    if (!fits) atomicMin(&a.report->bad_bag, static_cast<unsigned long long>(bag));
  }
}

// Leaves a batch's report in the host's memory, in turns: number `posted` is in slot
// posted % slots. A step that is run as a graph has one place for all of its runs, and the host
// looks at a report some steps later.
__global__ void __launch_bounds__(32)
    post_report(const BatchReport* report, BatchReport* slots, int64_t count, int64_t* posted) {
  if (threadIdx.x > 0) return;
  slots[*posted % count] = *report;
  *posted += 1;
}

}  // namespace oper
