// torch.ops.oper.sum_gradients on a device. Features, segments and the numbers of rows are the
// device's too, and nobody waits for them: what they say is vouched for by sort_accesses, which
// made the runs by them.

#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <cstdint>
#include <limits>
#include <optional>

#include "cpu/common/arguments.h"
#include "cpu/step/row_groups.h"
#include "device/arguments.h"
#include "device/library.h"
#include "oper/cuda/launchers.h"
#include "oper/step/feature.h"
#include "oper/step/pieces.h"

namespace oper {
namespace {

// The sums of groups [first_group, last_group) of `bucket` are written to `values`, where `groups`
// says. `positions` has room for as many accesses as the batch has.
void sum_gradients(const at::Tensor& grad, const at::Tensor& positions, const at::Tensor& run_start,
                   const at::Tensor& groups, int64_t, int64_t first_group, int64_t last_group,
                   const std::optional<at::Tensor>& offsets,
                   const std::optional<at::Tensor>& weights, const at::Tensor& features,
                   const at::Tensor& segment_offset, int64_t dim, double scale, at::Tensor& values,
                   bool by_bag, int64_t stream) {
  const c10::DeviceGuard guard(grad.device());
  SumArguments a{};
  const int64_t type = float_type(grad, "grad");
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
  check_on(groups, grad, "groups");
  a.all_groups = check_groups(groups, first_group, last_group);
  a.groups = elements<int64_t>(groups, "groups");
  a.first_group = first_group;
  a.last_group = last_group;
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
  TORCH_CHECK_VALUE(!by_bag || (offsets && !weights),
                    "by_bag: with offsets and without weights alone");
  a.by_bag = by_bag;
  check_size(dim, 1, kMostThings, "dim");
  a.dim = dim;
  a.scale = static_cast<float>(scale);
  check_on(values, grad, "values");
  a.values = writable_elements<float>(values, 0, "values");
  if (a.accesses == 0 || first_group == last_group || a.feature_count == 0) return;

  const auto room = [&](at::IntArrayRef shape, at::ScalarType dtype) {
    return at::empty(shape, grad.options().dtype(dtype));
  };
  at::Tensor bag_of, factor, partial;
  const at::Tensor place = room({a.accesses}, at::kInt);
  a.place = static_cast<uint32_t*>(place.mutable_data_ptr());
  if (offsets && !by_bag) {
    bag_of = room({a.accesses}, at::kInt);
    a.bag_of = bag_of.mutable_data_ptr<int32_t>();
  }
  if (offsets || weights) {
    factor = room({a.accesses}, at::kFloat);
    a.factor = factor.mutable_data_ptr<float>();
  }
  if (a.accesses > kAccessesPerPiece) {
    partial = room({partial_sums(a.accesses), dim}, at::kFloat);
    a.partial = partial.mutable_data_ptr<float>();
  }
  check_device(device_library().sum_gradients(&a, type, reinterpret_cast<void*>(stream)),
               "summing gradients could not be started");
}

}  // namespace
}  // namespace oper

TORCH_LIBRARY_IMPL(oper, CUDA, m) { m.impl("sum_gradients", oper::sum_gradients); }

// For tests, of memory that the emulator takes for a device's.
TORCH_LIBRARY_FRAGMENT(oper_emulated, m) {
  m.def(
      "sum_gradients(Tensor grad, Tensor positions, Tensor run_start, Tensor groups, int bucket,"
      " int first_group, int last_group, Tensor? offsets, Tensor? weights, Tensor features,"
      " Tensor segment_offset, int dim, float scale, Tensor(a!) values, bool by_bag=False,"
      " int stream=0) -> ()");
}
TORCH_LIBRARY_IMPL(oper_emulated, CPU, m) { m.impl("sum_gradients", oper::sum_gradients); }
