// The features of a batch, as the ops take them: descriptors and the accesses of each.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <cstdint>

#include "cpu/common/tensor_checks.h"
#include "oper/step/rows.h"

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
  constexpr int64_t kWords = sizeof(Feature) / sizeof(int64_t);
  TORCH_CHECK_VALUE(features.dim() == 2 && features.size(1) == kWords, "features: shape ",
                    features.sizes(), ", and [F, ", kWords, "] was needed");
  const int64_t count = features.size(0);
  const auto* const words = int64s(features, count * kWords, "features");
  const Features view{reinterpret_cast<const Feature*>(words),
                      int64s(segment_offset, count + 1, "segment_offset"), count};
  TORCH_CHECK_VALUE(view.segment_offset[0] == 0, "segment_offset: must begin with 0");
  for (int64_t f = 0; f < count; ++f)
    TORCH_CHECK_VALUE(view.begin(f) <= view.end(f),
                      "segment_offset: must ascend, and does not at feature ", f);
  return view;
}

}  // namespace oper
