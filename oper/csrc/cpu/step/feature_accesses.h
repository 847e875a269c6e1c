// The features of a batch, as the operators take them: descriptors and the accesses of each.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "cpu/common/arguments.h"
#include "oper/step/feature.h"

namespace oper {

struct Features {
  const Feature* features;
  const int64_t* segment_offset;  // [count + 1]
  int64_t count;

  const Feature& operator[](int64_t f) const { return features[f]; }
  int64_t begin(int64_t f) const { return segment_offset[f]; }
  int64_t end(int64_t f) const { return segment_offset[f + 1]; }
  int64_t accesses() const { return segment_offset[count]; }
};

inline Features features_of(const at::Tensor& features, const at::Tensor& segment_offset) {
  const auto* const descriptors = structs<Feature>(features, "features");
  const int64_t count = features.size(0);
  const Features view{descriptors, elements<int64_t>(segment_offset, count + 1, "segment_offset"),
                      count};
  check_offsets_from_zero(view.segment_offset, count, "segment_offset", "feature");
  return view;
}

}  // namespace oper
