// torch.ops.oper.update_runs, of devices alone: the step of rows whose gradients a batch of this
// rank's has and nobody else. What sum_gradients and update_rows do, without the sums in between.

#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <cstdint>
#include <optional>

#include "device/step_arguments.h"
#include "device/sum_arguments.h"
#include "schemas.h"

namespace oper {
namespace {

// The rows are those of one group, of as many as `before` has numbers but the last. `run_slot` has
// room for as many runs as the batch has accesses.
void update_runs(const at::Tensor& grad, const at::Tensor& positions, const at::Tensor& run_start,
                 const at::Tensor& run_slot, const at::Tensor& before, int64_t group,
                 const std::optional<at::Tensor>& offsets, const std::optional<at::Tensor>& weights,
                 const at::Tensor& features, const at::Tensor& segment_offset, double scale,
                 bool by_bag, at::Tensor& rows, at::Tensor& state, int64_t dim, int64_t dtype,
                 c10::string_view optimizer, at::ArrayRef<double> settings, at::Tensor& updated,
                 int64_t stream, bool means, const std::optional<at::Tensor>& marks,
                 const std::optional<at::Tensor>& packed) {
  const c10::DeviceGuard guard(rows.device());
  const size_t number = number_of(optimizer);
  RunUpdateArguments a{};
  set_step(rows, state, dim, dtype, number, settings, updated, marks, packed, a);
  check_on(grad, rows, "grad");
  elements<float>(grad, "grad");
  const Sums sums = sums_of(grad, positions, run_start, offsets, weights, features, segment_offset,
                            dim, scale, by_bag, means);
  a.sums = sums.arguments;
  check_on(run_slot, rows, "run_slot");
  a.run_slot = elements<int64_t>(run_slot, "run_slot");
  check_on(before, rows, "before");
  a.sums.groups = elements<int64_t>(before, "before");
  a.sums.all_groups = before.numel() - 1;
  check_index(group, a.sums.all_groups, "group", "before");
  a.sums.first_group = group;
  a.sums.last_group = group + 1;
  if (a.sums.accesses == 0 || a.sums.feature_count == 0) return;
  auto* const on = reinterpret_cast<void*>(stream);
  const DeviceLibrary& library = device_library();
  check_device(library.sum_gradients(&a.sums, kFloat32, on),
               "summing gradients of rows that are read often could not be started");
  check_device(library.update_runs(&a, static_cast<int64_t>(number), on),
               "the update of rows could not be started");
}

}  // namespace
}  // namespace oper

TORCH_LIBRARY_FRAGMENT(oper, m) { m.def(oper::schemas::kUpdateRuns); }
TORCH_LIBRARY_IMPL(oper, CUDA, m) { m.impl("update_runs", oper::update_runs); }

// For tests, of memory that the emulator takes for a device's.
TORCH_LIBRARY_FRAGMENT(oper_emulated, m) { m.def(oper::schemas::kUpdateRuns); }
TORCH_LIBRARY_IMPL(oper_emulated, CPU, m) { m.impl("update_runs", oper::update_runs); }
