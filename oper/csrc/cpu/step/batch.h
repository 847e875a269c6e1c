// The arguments that describe a batch, checked.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <optional>

#include "cpu/common/tensor_checks.h"
#include "oper/step/lookup.h"

namespace oper {

constexpr int64_t kFeatureWords = sizeof(Feature) / sizeof(int64_t);

// Offsets must ascend within the accesses: what they index is read without further checks.
template <typename Id>
void check_offsets(const Id* offsets, int64_t bags, int64_t accesses) {
  bool ascending = offsets[0] >= 0 && offsets[bags] <= accesses;
  for (int64_t b = 0; b < bags; ++b) ascending &= offsets[b] <= offsets[b + 1];
  TORCH_CHECK_VALUE(ascending, "offsets: must ascend from 0 or more to at most the ", accesses,
                    " accesses");
}

// Elements of `out_elements` that bags cover; features are checked on the way.
inline int64_t covered(const Batch& batch, int64_t bags, int64_t widths, int64_t out_elements) {
  int64_t sum = 0;
  for (int64_t f = 0; f < batch.feature_count; ++f) {
    const Feature& feature = batch.features[f];
    const int64_t last = std::max<int64_t>(feature.bags - 1, 0);
    const int64_t least = std::min(feature.out(0), feature.out(last));
    const int64_t most = std::max(feature.out(0), feature.out(last)) + feature.dim;
    TORCH_CHECK_VALUE(feature.width >= 0 && feature.width < widths && feature.dtype >= kFloat32 &&
                          feature.dtype <= kInt8 && feature.dim >= 0 &&
                          feature.row_bytes >= bytes_of_row(feature.dtype, feature.dim) &&
                          feature.first_bag >= 0 && feature.bags >= 0 &&
                          feature.first_bag + feature.bags <= bags &&
                          (feature.bags == 0 || (least >= 0 && most <= out_elements)),
                      "features: number ", f, " is of no arena, has more bags than the ", bags,
                      " there are, or ends beyond an output of ", out_elements, " elements");
    sum += feature.bags * feature.dim;
  }
  return sum;
}

inline Batch batch_of(const at::Tensor& addresses, const std::optional<at::Tensor>& offsets,
                      const std::optional<at::Tensor>& weights, const at::Tensor& features,
                      const at::Tensor& bases, int64_t rank) {
  TORCH_CHECK_VALUE(features.dim() == 2 && features.size(1) == kFeatureWords, "features: [F, ",
                    kFeatureWords, "] was needed");
  TORCH_CHECK_VALUE(bases.dim() == 2 && rank >= 0 && rank < bases.size(1) - 1,
                    "bases: [widths, ranks + 1] was needed, with a column for rank ", rank);
  Batch batch{};
  const int64_t accesses = batch.accesses = addresses.numel();
  batch.addresses = int64s(addresses, accesses, "addresses");
  if (offsets) {
    TORCH_CHECK_VALUE(offsets->is_contiguous() && offsets->numel() > 0,
                      "offsets: bags + 1 contiguous elements were needed");
    if (offsets->scalar_type() == at::kInt) {
      batch.offsets32 = offsets->const_data_ptr<int32_t>();
      check_offsets(batch.offsets32, offsets->numel() - 1, accesses);
    } else {
      batch.offsets64 = int64s(*offsets, offsets->numel(), "offsets");
      check_offsets(batch.offsets64, offsets->numel() - 1, accesses);
    }
  }
  if (weights) {
    TORCH_CHECK_TYPE(weights->scalar_type() == at::kFloat, "weights: dtype ",
                     weights->scalar_type(), ", and float32 was needed");
    TORCH_CHECK_VALUE(weights->is_contiguous() && weights->numel() == accesses,
                      "weights: ", weights->numel(), " contiguous elements, and one for each of ",
                      accesses, " accesses was needed");
    batch.weights = weights->const_data_ptr<float>();
  }
  batch.features = reinterpret_cast<const Feature*>(int64s(features, features.numel(), "features"));
  batch.feature_count = features.size(0);
  batch.bases = {int64s(bases, bases.numel(), "bases"), bases.size(1) - 1, rank};
  return batch;
}

// How many bags offsets describe.
inline int64_t bags_of(const at::Tensor& addresses, const std::optional<at::Tensor>& offsets) {
  return offsets ? offsets->numel() - 1 : addresses.numel();
}

}  // namespace oper
