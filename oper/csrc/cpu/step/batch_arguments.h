// The arguments by which operators are told of a batch, checked: its features, bags and accesses.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <type_traits>

#include "cpu/common/arguments.h"
#include "oper/step/feature.h"
#include "oper/step/row_formats.h"
#include "oper/step/row_stream.h"

namespace oper {

// The features of a batch: their descriptors, and the accesses of each.
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

// f(begins) with the offsets of bags [bags + 1], of int32 or int64, which ascend within `accesses`.
template <typename F>
void with_bag_offsets(const at::Tensor& offsets, int64_t accesses, const F& f) {
  OPER_CHECK_VALUE(offsets.numel() > 0, "offsets: expected bags + 1 elements, got none");
  with_index_type(offsets.scalar_type(), "offsets", [&](auto offset) {
    const auto* const begins = elements<decltype(offset)>(offsets, "offsets");
    check_offsets_within(begins, offsets.numel() - 1, accesses, "offsets", "accesses");
    f(begins);
  });
}

// Whether the sums of so many bags of a feature are within `elements` of the output or its
// gradient.
inline bool is_within(const Feature& feature, int64_t bags, int64_t elements) {
  if (bags == 0) return true;
  int64_t span = 0, last = 0;
  if (__builtin_mul_overflow(bags - 1, feature.out_stride, &span) ||
      __builtin_add_overflow(feature.out_base, span, &last))
    return false;
  return std::min(feature.out_base, last) >= 0 && feature.dim <= elements &&
         std::max(feature.out_base, last) <= elements - feature.dim;
}

// Checks that features fit the arenas, the bags and the output; returns how many of its elements
// their bags cover.
inline int64_t check_features(const Feature* features, int64_t count, int64_t bags, int64_t widths,
                              int64_t out_elements) {
  check_size(out_elements, 0, kMostRows, "out_elements");
  int64_t sum = 0;
  for (int64_t f = 0; f < count; ++f) {
    const Feature& feature = features[f];
    const bool is_row = feature.width >= 0 && feature.width < widths && feature.dtype >= kFloat32 &&
                        feature.dtype <= kInt8 && feature.dim >= 0 && feature.dim <= kMostThings &&
                        feature.row_bytes <= kMostRows &&
                        feature.row_bytes >= bytes_of_row(feature.dtype, feature.dim);
    const bool has_bags = feature.bags >= 0 && feature.bags <= bags && feature.first_bag >= 0 &&
                          feature.first_bag <= bags - feature.bags;
    OPER_CHECK_VALUE(is_row && has_bags && is_within(feature, feature.bags, out_elements),
                     "features: number ", f, " is of no arena, has more bags than the ", bags,
                     " there are, or ends beyond an output of ", out_elements, " elements");
    sum += feature.bags * feature.dim;
  }
  return sum;
}

inline void check_bases(const at::Tensor& bases, int64_t rank) {
  OPER_CHECK_VALUE(bases.dim() == 2 && rank >= 0 && bases.size(1) > 1 && rank < bases.size(1) - 1,
                   "bases: expected [widths, ranks + 1] with a column for rank ", rank, ", got ",
                   bases.sizes());
}

// The type of a lookup's output.
inline RowType output_type(at::ScalarType type) {
  OPER_CHECK_TYPE(type == at::kFloat || type == at::kHalf || type == at::kBFloat16,
                  "an output of dtype ", type, ", and it can be float32, float16 or bfloat16");
  return type == at::kFloat ? kFloat32 : type == at::kHalf ? kFloat16 : kBFloat16;
}

inline Batch batch_of(const at::Tensor& addresses, const std::optional<at::Tensor>& offsets,
                      const std::optional<at::Tensor>& weights, const at::Tensor& features,
                      const at::Tensor& bases, int64_t rank) {
  check_bases(bases, rank);
  Batch batch{};
  const int64_t accesses = batch.accesses = addresses.numel();
  batch.addresses = elements<int64_t>(addresses, "addresses");
  if (offsets) {
    with_bag_offsets(*offsets, accesses, [&](const auto* begins) {
      if constexpr (std::is_same_v<decltype(begins), const int32_t*>)
        batch.offsets32 = begins;
      else
        batch.offsets64 = begins;
    });
  }
  if (weights) batch.weights = elements<float>(*weights, accesses, "weights");
  batch.features = structs<Feature>(features, "features");
  batch.feature_count = features.size(0);
  batch.bases = {elements<int64_t>(bases, "bases"), bases.size(1) - 1, rank};
  return batch;
}

// How many bags offsets describe.
inline int64_t bags_of(const at::Tensor& addresses, const std::optional<at::Tensor>& offsets) {
  return offsets ? offsets->numel() - 1 : addresses.numel();
}

}  // namespace oper
