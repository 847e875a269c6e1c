// torch.ops.oper.update_rows: the owner's part of a training step, the gradients of all ranks
// merged and applied once to each row.

#include <ATen/Parallel.h>
#include <torch/library.h>

#include <atomic>
#include <cmath>

#include "cpu/common/tensor_checks.h"
#include "oper/common/simd.h"
#include "oper/step/merge.h"
#include "oper/step/optimizers.h"

namespace oper {
namespace {

constexpr int64_t kEntriesPerTask = 1024;

using Update = int64_t (*)(const std::vector<Gradients>&, const Arena&, const Settings&);

// One function an optimizer, as templates cannot be compiled for several processors at once.
#define OPER_UPDATE(Optimizer, name)                                              \
  OPER_SIMD int64_t name(const std::vector<Gradients>& lists, const Arena& arena, \
                         const Settings& settings) {                              \
    return update_rows<Optimizer>(lists, arena, settings);                        \
  }
OPER_UPDATE(Sgd, update_sgd)
OPER_UPDATE(MomentumSgd, update_momentum_sgd)
OPER_UPDATE(Adagrad, update_adagrad)
OPER_UPDATE(RowwiseAdagrad, update_rowwise_adagrad)
OPER_UPDATE(Adam, update_adam)
OPER_UPDATE(PartialRowwiseAdam, update_partial_rowwise_adam)
#undef OPER_UPDATE

struct Kind {
  const char* name;
  Update update;
  int64_t (*state_values)(int64_t dim);
};

constexpr Kind kKinds[] = {
    {"sgd", update_sgd, Sgd::state_values},
    {"momentum_sgd", update_momentum_sgd, MomentumSgd::state_values},
    {"adagrad", update_adagrad, Adagrad::state_values},
    {"rowwise_adagrad", update_rowwise_adagrad, RowwiseAdagrad::state_values},
    {"adam", update_adam, Adam::state_values},
    {"partial_rowwise_adam", update_partial_rowwise_adam, PartialRowwiseAdam::state_values},
};

const Kind& kind_of(c10::string_view optimizer) {
  for (const Kind& kind : kKinds)
    if (optimizer == kind.name) return kind;
  TORCH_CHECK_VALUE(false, "optimizer: ", optimizer, " is not known");
}

Settings settings_of(at::ArrayRef<double> values) {
  TORCH_CHECK_VALUE(values.size() == 8, "settings: ", values.size(), " values, and 8 were needed");
  Settings s;
  s.lr = static_cast<float>(values[0]);
  s.eps = static_cast<float>(values[1]);
  s.l2 = static_cast<float>(values[2]);
  s.shrink = static_cast<float>(values[3]);
  s.beta1 = static_cast<float>(values[4]);
  s.rest1 = static_cast<float>(1 - values[4]);
  s.beta2 = static_cast<float>(values[5]);
  s.rest2 = static_cast<float>(1 - values[5]);
  s.step_size = static_cast<float>(values[6]);
  s.root_scale = static_cast<float>(values[7]);
  return s;
}

Arena arena_of(const at::Tensor& rows, const at::Tensor& state, int64_t dim, int64_t dtype,
               const Kind& kind) {
  TORCH_CHECK_VALUE(dtype == kFloat32 || dtype == kFloat16 || dtype == kBFloat16, "dtype: ", dtype,
                    ", and 0 (float32), 1 (float16) or 2 (bfloat16) was needed");
  for (const at::Tensor& part : {rows, state})
    TORCH_CHECK_TYPE(part.scalar_type() == at::kByte && part.dim() == 2 && part.is_contiguous(),
                     "rows, state: contiguous uint8 [slots, bytes] were needed");
  TORCH_CHECK_VALUE(rows.size(0) == state.size(0), "rows, state: ", rows.size(0), " and ",
                    state.size(0), " slots, and equal numbers were needed");
  const Arena arena{static_cast<uint8_t*>(rows.data_ptr()),
                    rows.size(1),
                    static_cast<uint8_t*>(state.data_ptr()),
                    state.size(1),
                    dim,
                    static_cast<RowType>(dtype)};
  TORCH_CHECK_VALUE(dim > 0 && bytes_of_row(dtype, dim) <= arena.row_bytes,
                    "rows: ", arena.row_bytes, " bytes a slot are too few for ", dim, " values");
  const int64_t state_bytes = kind.state_values(dim) * static_cast<int64_t>(sizeof(float));
  TORCH_CHECK_VALUE(state_bytes <= arena.state_bytes, "state: ", arena.state_bytes,
                    " bytes a slot, and ", kind.name, " needs ", state_bytes);
  const int64_t value_bytes = bytes_of_row(dtype, 1);
  TORCH_CHECK_VALUE(arena.row_bytes % value_bytes == 0 && arena.state_bytes % 4 == 0,
                    "rows, state: values must not straddle slots");
  return arena;
}

// The lists that are not empty, checked: ascending slots of the arena, with a gradient for each.
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
    TORCH_CHECK_VALUE(grad.is_contiguous() && grad.numel() == size * dim, "grads: list ", n, " is ",
                      grad.sizes(), ", and contiguous [", size, ", ", dim, "] was needed");
    if (size == 0) continue;
    bool ascending = true;
    for (int64_t i = 1; i < size; ++i) ascending &= slot[i - 1] < slot[i];
    TORCH_CHECK_VALUE(ascending, "slots: list ", n, " does not ascend");
    TORCH_CHECK_INDEX(slot[0] >= 0 && slot[size - 1] < arena_slots, "slots: list ", n,
                      " goes from ", slot[0], " to ", slot[size - 1], ", and the arena has ",
                      arena_slots, " slots");
    lists.push_back({slot, grad.const_data_ptr<float>(), 0, size});
  }
  return lists;
}

int64_t update(at::TensorList slots, at::TensorList grads, const at::Tensor& rows,
               const at::Tensor& state, int64_t dim, int64_t dtype, c10::string_view optimizer,
               at::ArrayRef<double> settings) {
  const Kind& kind = kind_of(optimizer);
  const Settings values = settings_of(settings);
  const Arena arena = arena_of(rows, state, dim, dtype, kind);
  const std::vector<Gradients> lists = lists_of(slots, grads, rows.size(0), dim);
  if (lists.empty()) return 0;
  int64_t entries = 0;
  for (const Gradients& list : lists) entries += list.size();
  const int64_t threads = at::get_num_threads();
  const int64_t pieces =
      threads == 1 ? 1 : std::min<int64_t>(4 * threads, entries / kEntriesPerTask + 1);
  const std::vector<int64_t> bounds = cut_slots(lists, pieces);
  std::atomic<int64_t> distinct{0};
  at::parallel_for(0, pieces, 1, [&](int64_t begin, int64_t end) {
    distinct += kind.update(part_of(lists, bounds[begin], bounds[end]), arena, values);
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
