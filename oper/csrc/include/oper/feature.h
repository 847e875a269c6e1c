// One feature of a batch, as oper/runtime/features.py describes it in twelve int64.
#pragma once

#include <cstdint>

namespace oper {

struct Feature {
  int64_t bucket;
  int64_t width;
  int64_t dtype;
  int64_t dim;
  int64_t row_bytes;
  int64_t first_bag;     // of the batch; bags without offsets hold one access each
  int64_t bags;
  int64_t out_base;      // bag i of the feature is out[out_base + i·out_stride : + dim]
  int64_t out_stride;
  int64_t mean;          // sums are divided by the bag's length
  int64_t has_gradient;  // 0: of a frozen table, left out of the sort
  int64_t unused;
};
static_assert(sizeof(Feature) == 12 * sizeof(int64_t), "FEATURE_WORDS of oper/runtime/features.py");

}  // namespace oper
