// torch.ops.oper.update_rows on a device. Slots, gradients and how many there are of each group lie
// on the device, where only a wait could check them: whoever calls vouches that the slots of a
// group ascend, and a slot that is not the arena's is passed over.

#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <algorithm>
#include <optional>

#include "cpu/step/row_groups.h"
#include "device/step_arguments.h"
#include "schemas.h"

namespace oper {
namespace {

// Group number `group` of rows and gradients that lie on the device. Where dim is a multiple of
// four values, so is what lies before a group's gradients: a bucket's begin at multiples of
// sixteen.
UpdateList list_of(const at::Tensor& slots, const at::Tensor& values, const at::Tensor& groups,
                   int64_t group, const at::Tensor& rows) {
  check_on(slots, rows, "slots");
  check_on(values, rows, "values");
  check_on(groups, rows, "groups");
  const int64_t count = count_groups(groups, "groups");
  const auto* const before = elements<int64_t>(groups, "groups");
  check_index(group, count, "group", "groups");
  check_size(slots.numel(), 0, int64_t{1} << 30, "slots: elements");  // entries are ints
  return {elements<int64_t>(slots, "slots"), elements<float>(values, "values"), before + group,
          before + count + 1 + group};
}

void update_rows(at::TensorList slots, at::TensorList values, at::TensorList groups,
                 at::IntArrayRef group, const at::Tensor& rows, const at::Tensor& state,
                 int64_t dim, int64_t dtype, c10::string_view optimizer,
                 at::ArrayRef<double> settings, at::Tensor& updated, int64_t stream,
                 const std::optional<at::Tensor>& marks, const std::optional<at::Tensor>& packed) {
  const c10::DeviceGuard guard(rows.device());
  const size_t number = number_of(optimizer);
  UpdateArguments a{};
  set_step(rows, state, dim, dtype, number, settings, updated, marks, packed, a);
  const size_t lists = slots.size();
  OPER_CHECK_VALUE(lists == values.size() && lists == groups.size() && lists == group.size(),
                   "slots, values, groups, group: expected equal numbers of them, got ", lists,
                   ", ", values.size(), ", ", groups.size(), " and ", group.size());
  OPER_CHECK_VALUE(lists <= kMostLists, "slots: ", lists, " lists, and at most ", kMostLists,
                   " can be merged on a device");
  if (lists == 0) return;
  a.lists = static_cast<int64_t>(lists);
  int64_t most_rows = 0;
  for (size_t n = 0; n < lists; ++n) {
    a.list[n] = list_of(slots[n], values[n], groups[n], group[n], rows);
    a.wide_rows &= is_wide(a.list[n].values);
    most_rows = std::max(most_rows, slots[n].numel());
  }
  check_device(device_library().update_rows(&a, static_cast<int64_t>(number), most_rows,
                                            reinterpret_cast<void*>(stream)),
               "the update of rows could not be started");
}

}  // namespace
}  // namespace oper

TORCH_LIBRARY_IMPL(oper, CUDA, m) { m.impl("update_rows", oper::update_rows); }

// update_rows for tests, of memory that the emulator takes for a device's.
TORCH_LIBRARY_FRAGMENT(oper_emulated, m) { m.def(oper::schemas::kUpdateRows); }
TORCH_LIBRARY_IMPL(oper_emulated, CPU, m) { m.impl("update_rows", oper::update_rows); }
