// Where the gradients of a batch's rows lie: group after group, each bucket's from a line on.
#pragma once

#include <cstdint>

#include "oper/common/simd.h"

namespace oper {

// Values of a line of the caches, and more than a device loads at once.
constexpr int64_t kLineValues = 16;

// The values before the gradients of each of `buckets` times `of_bucket` groups, and their end,
// from the rows before each group; `next` is what other buckets take before them.
OPER_HD inline void place_gradients(const int64_t* before, int64_t buckets, int64_t of_bucket,
                                    const int64_t* dims, int64_t* place, int64_t next = 0) {
  for (int64_t bucket = 0; bucket < buckets; ++bucket) {
    next = (next + kLineValues - 1) / kLineValues * kLineValues;
    for (int64_t n = 0; n < of_bucket; ++n, ++before) {
      *place++ = next;
      next += (before[1] - before[0]) * dims[bucket];
    }
  }
  *place = next;
}

}  // namespace oper
