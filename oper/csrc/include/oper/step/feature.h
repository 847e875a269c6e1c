// One feature of a batch, as the kernels of a step see it: where its rows and its sums are.
#pragma once

#include <cstdint>
#include <string>

#include "oper/common/simd.h"
#include "oper/common/struct_fields.h"

namespace oper {

// Declared as FEATURE in oper/runtime/tables/kernel_structs.py.
struct Feature {
  int64_t bucket;
  int64_t width;
  int64_t dtype;  // a RowType
  int64_t dim;
  int64_t row_bytes;  // from one slot of the arena to the next
  int64_t first_bag;  // of the batch; bags without offsets hold one access each
  int64_t bags;
  int64_t out_base;  // of the output, in elements: see out()
  int64_t out_stride;
  int64_t mean;          // sums are divided by the bag's length
  int64_t has_gradient;  // 0: of a frozen table, left out of the sort
  int64_t lookup;        // its number in the module; no kernel reads it

  // The first element of a bag's sum in the output, or of its gradient.
  OPER_HD int64_t out(int64_t bag) const { return out_base + bag * out_stride; }

  static std::string fields() {
    return Fields<Feature>()
        .add("bucket", &Feature::bucket)
        .add("width", &Feature::width)
        .add("dtype", &Feature::dtype)
        .add("dim", &Feature::dim)
        .add("row_bytes", &Feature::row_bytes)
        .add("first_bag", &Feature::first_bag)
        .add("bags", &Feature::bags)
        .add("out_base", &Feature::out_base)
        .add("out_stride", &Feature::out_stride)
        .add("mean", &Feature::mean)
        .add("has_gradient", &Feature::has_gradient)
        .add("lookup", &Feature::lookup)
        .text();
  }
};

}  // namespace oper
