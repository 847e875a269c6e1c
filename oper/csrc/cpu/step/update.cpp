// torch.ops.oper.update_rows: the owner's part of a training step, the gradients of all ranks
// merged and applied once to each row.

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <atomic>
#include <cstring>
#include <optional>
#include <vector>

#include "cpu/common/arguments.h"
#include "cpu/step/row_groups.h"
#include "cpu/step/update_arguments.h"
#include "oper/common/simd.h"
#include "oper/step/merge_gradients.h"
#include "oper/step/update_rows.h"
#include "schemas.h"

namespace oper {

OPER_SIMD void narrow_at_random(const float* values, RowType type, int64_t dim, RowBits random,
                                uint8_t* row) {
  uint16_t* const halves = reinterpret_cast<uint16_t*>(row);
  const auto width = static_cast<uint32_t>(dim);
  if (type == kFloat16)
    for (uint32_t d = 0; d < width; ++d) halves[d] = half_of_float(values[d], random.of_value(d));
  else
    for (uint32_t d = 0; d < width; ++d) halves[d] = bfloat_of_float(values[d], random.of_value(d));
}

namespace {

constexpr int64_t kEntriesPerTask = 1024;

// One function an optimizer: templates cannot be compiled for several processors, and a function
// that holds all of them is slower for narrow rows.
using Lists = std::vector<Gradients>;
OPER_SIMD int64_t update(Sgd, const Lists& lists, const Arena& arena, const Settings& settings) {
  return update_rows<Sgd>(lists, arena, settings);
}
OPER_SIMD int64_t update(MomentumSgd, const Lists& lists, const Arena& arena,
                         const Settings& settings) {
  return update_rows<MomentumSgd>(lists, arena, settings);
}
OPER_SIMD int64_t update(Adagrad, const Lists& lists, const Arena& arena,
                         const Settings& settings) {
  return update_rows<Adagrad>(lists, arena, settings);
}
OPER_SIMD int64_t update(RowwiseAdagrad, const Lists& lists, const Arena& arena,
                         const Settings& settings) {
  return update_rows<RowwiseAdagrad>(lists, arena, settings);
}
OPER_SIMD int64_t update(Adam, const Lists& lists, const Arena& arena, const Settings& settings) {
  return update_rows<Adam>(lists, arena, settings);
}
OPER_SIMD int64_t update(PartialRowwiseAdam, const Lists& lists, const Arena& arena,
                         const Settings& settings) {
  return update_rows<PartialRowwiseAdam>(lists, arena, settings);
}

// The lists that are not empty, checked: ascending slots of the arena, with a gradient for each.
std::vector<Gradients> lists_of(at::TensorList slots, at::TensorList values, at::TensorList groups,
                                at::IntArrayRef group, int64_t arena_slots, int64_t dim) {
  OPER_CHECK_VALUE(slots.size() == values.size() && slots.size() == groups.size() &&
                       slots.size() == group.size(),
                   "slots, values, groups, group: expected equal numbers of them, got ",
                   slots.size(), ", ", values.size(), ", ", groups.size(), " and ", group.size());
  std::vector<Gradients> lists;
  for (size_t n = 0; n < slots.size(); ++n) {
    const RowGroup of =
        row_group(groups[n], group[n], group[n] + 1, dim, slots[n].numel(), values[n].numel());
    const int64_t* const slot = elements<int64_t>(slots[n], "slots") + of.begin;
    const float* const gradients = elements<float>(values[n], "values") + of.value;
    const int64_t size = of.rows();
    if (size == 0) continue;
    bool ascending = true;
    for (int64_t i = 1; i < size; ++i) ascending &= slot[i - 1] < slot[i];
    OPER_CHECK_VALUE(ascending, "slots: list ", n, " does not ascend");
    OPER_CHECK_INDEX(slot[0] >= 0 && slot[size - 1] < arena_slots, "slots: list ", n, " goes from ",
                     slot[0], " to ", slot[size - 1], ", and the arena has ", arena_slots,
                     " slots");
    lists.push_back({slot, gradients, 0, size});
  }
  return lists;
}

void update_all(at::TensorList slots, at::TensorList values, at::TensorList groups,
                at::IntArrayRef group, const at::Tensor& rows, const at::Tensor& state, int64_t dim,
                int64_t dtype, c10::string_view optimizer, at::ArrayRef<double> settings,
                at::Tensor& updated, int64_t /*stream*/, const std::optional<at::Tensor>& marks,
                const std::optional<at::Tensor>& /*packed*/) {
  const size_t number = number_of(optimizer);
  const Settings step = settings_of(settings);
  const Arena arena = arena_of(rows, state, dim, dtype, number, marks);
  const std::vector<Gradients> lists = lists_of(slots, values, groups, group, rows.size(0), dim);
  int64_t* const count = writable_elements<int64_t>(updated, 1, "updated");
  if (lists.empty()) return;
  int64_t entries = 0;
  for (const Gradients& list : lists) entries += list.size();
  const int64_t threads = at::get_num_threads();
  const int64_t pieces =
      threads == 1 ? 1 : std::min<int64_t>(4 * threads, entries / kEntriesPerTask + 1);
  const std::vector<int64_t> bounds = cut_slots(lists, pieces);
  std::atomic<int64_t> distinct{0};
  at::parallel_for(0, pieces, 1, [&](int64_t begin, int64_t end) {
    distinct += with_optimizer(number, [&](auto of) {
      return update(of, part_of(lists, bounds[begin], bounds[end]), arena, step);
    });
  });
  *count += distinct;
}

// Settings as kernels of devices take them from memory: int64 words.
at::Tensor pack_settings(at::ArrayRef<double> settings) {
  static_assert(sizeof(Settings) % sizeof(int64_t) == 0);
  const Settings step = settings_of(settings);
  at::Tensor packed = at::empty({sizeof(Settings) / sizeof(int64_t)}, at::kLong);
  std::memcpy(packed.data_ptr(), &step, sizeof(step));
  return packed;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(oper, m) {
  m.def(oper::schemas::kUpdateRows);
  m.def("pack_settings(float[] settings) -> Tensor", pack_settings);
}

TORCH_LIBRARY_IMPL(oper, CPU, m) { m.impl("update_rows", update_all); }

}  // namespace oper
