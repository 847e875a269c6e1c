// The place of a number among offsets that ascend, as kernels look for it: which feature or bag an
// access is of. Threads that look for numbers near each other load the same offsets at first.
#pragma once

#include <type_traits>

#include "oper/cuda/device.h"

namespace oper {

// The last of begins [first, end) that is at most `number`; that of `first` is.
template <typename Offset, typename Place, typename End>
__device__ __forceinline__ auto last_at_most(const Offset* begins, Place first, End end,
                                             int64_t number) {
  std::common_type_t<Place, End> low = first, high = end;
  while (high - low > 1) {
    const auto middle = low + (high - low) / 2;
    (static_cast<int64_t>(begins[middle]) <= number ? low : high) = middle;
  }
  return low;
}

}  // namespace oper
