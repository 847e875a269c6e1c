// What kernels that sum a batch's gradients by row are given. Features, segments and the numbers of
// rows are the device's, and nobody waits for them: what they say is vouched for by sort_accesses,
// which made the runs by them.
#pragma once

#include <ATen/ops/empty.h>

#include <cstdint>
#include <limits>
#include <optional>

#include "device/arguments.h"
#include "device/library.h"
#include "oper/cuda/launchers.h"
#include "oper/step/feature.h"
#include "oper/step/pieces.h"

namespace oper {

// The arguments of a call, and the memory that they point to until its kernels were started.
struct Sums {
  SumArguments arguments{};
  at::Tensor place, bag_of, factor, partial;
};

// All but the groups and where the sums go; `positions` has room for as many accesses as the batch
// has.
inline Sums sums_of(const at::Tensor& grad, const at::Tensor& positions,
                    const at::Tensor& run_start, const std::optional<at::Tensor>& offsets,
                    const std::optional<at::Tensor>& weights, const at::Tensor& features,
                    const at::Tensor& segment_offset, int64_t dim, double scale, bool by_bag,
                    bool means) {
  Sums sums;
  SumArguments& a = sums.arguments;
  // The kernels keep places of gradients in 32 bits.
  check_size(grad.numel(), 0, int64_t{1} << 32, "grad: elements");
  check_contiguous(grad, "grad");
  a.grad = static_cast<const uint8_t*>(grad.const_data_ptr());
  check_on(positions, grad, "positions");
  a.accesses = positions.numel();
  check_size(a.accesses, 0, std::numeric_limits<int32_t>::max(), "positions: accesses");
  a.positions = elements<int32_t>(positions, "positions");
  check_on(run_start, grad, "run_start");
  a.run_start = elements<int32_t>(run_start, "run_start");
  check_on(features, grad, "features");
  a.features = structs<Feature>(features, "features");
  a.feature_count = features.size(0);
  check_on(segment_offset, grad, "segment_offset");
  a.segment_offset = elements<int64_t>(segment_offset, a.feature_count + 1, "segment_offset");
  if (offsets) {
    check_on(*offsets, grad, "offsets");
    set_offsets(*offsets, a);
    a.bags = offsets->numel() - 1;
  }
  if (weights) {
    check_on(*weights, grad, "weights");
    a.weights = elements<float>(*weights, a.accesses, "weights");
  }
  OPER_CHECK_VALUE(!by_bag || (offsets && !weights),
                   "by_bag: with offsets and without weights alone");
  a.by_bag = by_bag;
  check_size(dim, 1, kMostThings, "dim");
  a.dim = dim;
  a.scale = static_cast<float>(scale);

  const auto room = [&](at::IntArrayRef shape, at::ScalarType dtype) {
    return at::empty(shape, grad.options().dtype(dtype));
  };
  sums.place = room({a.accesses}, at::kInt);
  a.place = static_cast<uint32_t*>(sums.place.mutable_data_ptr());
  if (offsets && !by_bag) {
    sums.bag_of = room({a.accesses}, at::kInt);
    a.bag_of = sums.bag_of.mutable_data_ptr<int32_t>();
  }
  if (weights || (offsets && means)) {
    sums.factor = room({a.accesses}, at::kFloat);
    a.factor = sums.factor.mutable_data_ptr<float>();
  }
  if (a.accesses > kAccessesPerPiece) {
    sums.partial = room({partial_sums(a.accesses), dim}, at::kFloat);
    a.partial = sums.partial.mutable_data_ptr<float>();
  }
  return sums;
}

}  // namespace oper
