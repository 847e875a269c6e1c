// torch.ops.oper.update_rows: the owner's part of a training step, gradients of all ranks merged
// and applied once to each row.

#include <ATen/Parallel.h>
#include <torch/library.h>

#include <atomic>

#include "counters.h"
#include "oper/merge.h"
#include "oper/optimizers.h"

namespace oper {
namespace {

constexpr int64_t kEntriesPerTask = 512;

enum class RowType : int64_t { kFloat = 0, kHalf = 1, kBFloat16 = 2 };

int64_t value_bytes(RowType type) { return type == RowType::kFloat ? 4 : 2; }

// Lists that are not empty, checked: ascending slots of the arena, a gradient for each.
std::vector<Gradients> lists_of(at::TensorList slots, at::TensorList grads, int64_t arena_slots,
                                int64_t dim) {
  TORCH_CHECK_VALUE(slots.size() == grads.size(), "slots, grads: ", slots.size(), " and ",
                    grads.size(), " lists, and as many of one as of the other were needed");
  std::vector<Gradients> lists;
  for (size_t n = 0; n < slots.size(); ++n) {
    const int64_t size = slots[n].numel();
    const int64_t* slot = int64s(slots[n], size, "slots");
    const at::Tensor& grad = grads[n];
    TORCH_CHECK_TYPE(grad.scalar_type() == at::kFloat, "grads: dtype ", grad.scalar_type(),
                     ", and float32 was needed");
    TORCH_CHECK_VALUE(grad.is_contiguous() && grad.numel() == size * dim, "grads: list ", n,
                      " has ", grad.sizes(), " values, and contiguous [", size, ", ", dim,
                      "] were needed");
    if (size == 0) continue;
    bool ascending = true;
    for (int64_t i = 1; i < size; ++i) ascending &= slot[i - 1] < slot[i];
    TORCH_CHECK_VALUE(ascending, "slots: list ", n, " does not ascend");
    TORCH_CHECK_INDEX(slot[0] >= 0 && slot[size - 1] < arena_slots, "slots: list ", n, " goes from ",
                      slot[0], " to ", slot[size - 1], ", and the arena has ", arena_slots,
                      " slots");
    lists.push_back({slot, grad.const_data_ptr<float>(), 0, size});
  }
  return lists;
}

Arena arena_of(const at::Tensor& rows, const at::Tensor& state, int64_t dim, RowType type) {
  for (const at::Tensor& part : {rows, state})
    TORCH_CHECK_TYPE(part.scalar_type() == at::kByte && part.dim() == 2 && part.is_contiguous(),
                     "rows, state: contiguous uint8 [slots, bytes] were needed");
  TORCH_CHECK_VALUE(rows.size(0) == state.size(0), "rows, state: ", rows.size(0), " and ",
                    state.size(0), " slots, and equal numbers were needed");
  const Arena arena{static_cast<uint8_t*>(rows.data_ptr()), rows.size(1),
                    static_cast<uint8_t*>(state.data_ptr()), state.size(1), dim};
  TORCH_CHECK_VALUE(dim > 0 && dim * value_bytes(type) <= arena.row_bytes, "rows: ",
                    arena.row_bytes, " bytes a slot are too few for ", dim, " values");
  return arena;
}

int64_t update(at::TensorList slots, at::TensorList grads, const at::Tensor& rows,
               const at::Tensor& state, int64_t dim, int64_t dtype, c10::string_view optimizer,
               at::ArrayRef<double> settings) {
  const auto type = static_cast<RowType>(dtype);
  TORCH_CHECK_VALUE(type == RowType::kFloat && optimizer == "sgd", "not there yet");
  const Arena arena = arena_of(rows, state, dim, type);
  const std::vector<Gradients> lists = lists_of(slots, grads, rows.size(0), dim);
  TORCH_CHECK_VALUE(settings.size() >= 3, "settings: too few");
  const Settings values{static_cast<float>(settings[0]), static_cast<float>(settings[1]),
                        static_cast<float>(settings[2])};
  if (lists.empty()) return 0;
  int64_t entries = 0;
  for (const Gradients& list : lists) entries += list.end;
  const int64_t pieces = std::min<int64_t>(4 * at::get_num_threads(), entries / kEntriesPerTask + 1);
  const std::vector<int64_t> bounds = cut_slots(lists, pieces);
  std::atomic<int64_t> distinct{0};
  at::parallel_for(0, pieces, 1, [&](int64_t begin, int64_t end) {
    distinct += update_rows<Sgd>(part_of(lists, bounds[begin], bounds[end]), arena, values);
  });
  return distinct;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(oper, m) {
  m.def(
      "update_rows(Tensor[] slots, Tensor[] grads, Tensor(a!) rows, Tensor(b!) state, int dim,"
      " int dtype, str optimizer, float[] settings) -> int");
}

TORCH_LIBRARY_IMPL(oper, CPU, m) { m.impl("update_rows", update); }

}  // namespace oper
