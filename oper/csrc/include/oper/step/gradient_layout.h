// Where the gradients of a batch's rows lie: group after group, each bucket's from a line on.
#pragma once

#include <cstdint>

#include "oper/common/simd.h"

namespace oper {

// Values of a line of the caches, and more than a device loads at once.
constexpr int64_t kLineValues = 16;

// The values from the first of a bucket with so many rows to the first of the next bucket.
OPER_HD inline int64_t bucket_values(int64_t rows, int64_t dim) {
  return (rows * dim + kLineValues - 1) / kLineValues * kLineValues;
}

// The values before the gradients of group `n` of a bucket, from the rows before each of its groups
// and the values before the first of them.
OPER_HD inline int64_t place_of_group(const int64_t* before, int64_t n, int64_t dim,
                                      int64_t first) {
  return first + (before[n] - before[0]) * dim;
}

// The values before the gradients of each of `buckets` times `of_bucket` groups, and their end,
// from the rows before each group.
inline void place_gradients(const int64_t* before, int64_t buckets, int64_t of_bucket,
                            const int64_t* dims, int64_t* place) {
  *place = 0;
  for (int64_t bucket = 0, first = 0; bucket < buckets; ++bucket) {
    // The end of a bucket gives way to where the next one begins.
    for (int64_t n = 0; n <= of_bucket; ++n)
      place[n] = place_of_group(before, n, dims[bucket], first);
    first += bucket_values(before[of_bucket] - before[0], dims[bucket]);
    before += of_bucket;
    place += of_bucket;
  }
}

}  // namespace oper
