// torch.ops.oper.sum_gradients on a device.

#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <cstdint>
#include <optional>

#include "cpu/step/row_groups.h"
#include "device/sum_arguments.h"
#include "schemas.h"

namespace oper {
namespace {

// The sums of groups [first_group, last_group) of `bucket` are written to `values`, where `groups`
// says. `means` is whether a feature may be pooled by its mean: the features are on the device.
void sum_gradients(const at::Tensor& grad, const at::Tensor& positions, const at::Tensor& run_start,
                   const at::Tensor& groups, int64_t, int64_t first_group, int64_t last_group,
                   const std::optional<at::Tensor>& offsets,
                   const std::optional<at::Tensor>& weights, const at::Tensor& features,
                   const at::Tensor& segment_offset, int64_t dim, double scale, at::Tensor& values,
                   bool by_bag, int64_t stream, bool means,
                   const std::optional<at::Tensor>& /*client_grad*/, int64_t /*own_features*/) {
  const c10::DeviceGuard guard(grad.device());
  const int64_t type = float_type(grad, "grad");
  Sums sums = sums_of(grad, positions, run_start, offsets, weights, features, segment_offset, dim,
                      scale, by_bag, means);
  SumArguments& a = sums.arguments;
  check_on(groups, grad, "groups");
  a.all_groups = check_groups(groups, first_group, last_group);
  a.groups = elements<int64_t>(groups, "groups");
  a.first_group = first_group;
  a.last_group = last_group;
  check_on(values, grad, "values");
  a.values = writable_elements<float>(values, 0, "values");
  if (a.accesses == 0 || first_group == last_group || a.feature_count == 0) return;
  check_device(device_library().sum_gradients(&a, type, reinterpret_cast<void*>(stream)),
               "summing gradients could not be started");
}

}  // namespace
}  // namespace oper

TORCH_LIBRARY_IMPL(oper, CUDA, m) { m.impl("sum_gradients", oper::sum_gradients); }

// For tests, of memory that the emulator takes for a device's.
TORCH_LIBRARY_FRAGMENT(oper_emulated, m) { m.def(oper::schemas::kSumGradients); }
TORCH_LIBRARY_IMPL(oper_emulated, CPU, m) { m.impl("sum_gradients", oper::sum_gradients); }
