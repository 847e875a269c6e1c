// The place of a number among offsets that ascend, as kernels look for it: which feature or bag an
// access is of. Threads that look for numbers near each other load the same offsets at first.
#pragma once

#include "oper/cuda/device.h"

namespace oper {

// The last of begins [low, high) that is at most `number`; that of `low` is.
template <typename Offset>
__device__ __forceinline__ int64_t last_at_most(const Offset* begins, int64_t low, int64_t high,
                                                int64_t number) {
  while (high - low > 1) {
    const int64_t middle = (low + high) / 2;
    (static_cast<int64_t>(begins[middle]) <= number ? low : high) = middle;
  }
  return low;
}

}  // namespace oper
