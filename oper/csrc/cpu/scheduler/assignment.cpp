// torch.ops.oper.assign_in_order, assign_exactly and assign_partly: samples to workers by costs.

#include "oper/scheduler/assignment.h"

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <cmath>
#include <limits>
#include <numeric>
#include <optional>
#include <utility>
#include <vector>

#include "cpu/common/arguments.h"
#include "cpu/scheduler/room.h"

namespace oper {
namespace {

struct Given {
  const double* costs;
  int64_t samples, workers;
  std::vector<int64_t> room;
};

Given checked(const at::Tensor& costs, const at::Tensor& room) {
  OPER_CHECK_VALUE(costs.dim() == 2, "costs: expected [samples, workers], got ", costs.sizes());
  check_size(costs.size(0), 0, kMostAssigned, "samples");
  check_size(costs.size(1), 1, kMostAssigned, "workers");
  const double* const values = elements<double>(costs, "costs");
  int64_t finite = 0;
  for (int64_t n = 0; n < costs.numel(); ++n)
    finite += std::abs(values[n]) <= std::numeric_limits<double>::max();
  OPER_CHECK_VALUE(finite == costs.numel(), "costs: all must be finite");
  return {values, costs.size(0), costs.size(1), checked_room(room, costs.size(1), costs.size(0))};
}

// The worker of each sample [n], for costs [n, M] and room [M]; of equally cheap ones the first, or
// one by the seed.
at::Tensor in_order(const at::Tensor& costs, const at::Tensor& room, std::optional<int64_t> seed) {
  Given given = checked(costs, room);
  at::Tensor assignment = at::empty({given.samples}, at::kLong);
  std::vector<int64_t> order(given.samples);
  std::iota(order.begin(), order.end(), 0);
  assign_in_order(given.costs, order, given.workers, given.room,
                  seed ? Ties(static_cast<uint64_t>(*seed)) : Ties(),
                  assignment.data_ptr<int64_t>());
  return assignment;
}

at::Tensor exactly(const at::Tensor& costs, const at::Tensor& room) {
  Given given = checked(costs, room);
  at::Tensor assignment = at::empty({given.samples}, at::kLong);
  ExactAssignment(given.costs, given.samples, given.workers, assignment.data_ptr<int64_t>())
      .assign(std::move(given.room));
  return assignment;
}

at::Tensor partly(const at::Tensor& costs, const at::Tensor& room, int64_t exact_samples) {
  Given given = checked(costs, room);
  check_size(exact_samples, 0, given.samples, "exact_samples");
  at::Tensor assignment = at::empty({given.samples}, at::kLong);
  assign_partly(given.costs, given.samples, given.workers, std::move(given.room), exact_samples,
                assignment.data_ptr<int64_t>());
  return assignment;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(oper, m) {
  m.def("assign_in_order(Tensor costs, Tensor room, int? seed=None) -> Tensor");
  m.def("assign_exactly(Tensor costs, Tensor room) -> Tensor");
  m.def("assign_partly(Tensor costs, Tensor room, int exact_samples) -> Tensor");
}

TORCH_LIBRARY_IMPL(oper, CPU, m) {
  m.impl("assign_in_order", in_order);
  m.impl("assign_exactly", exactly);
  m.impl("assign_partly", partly);
}

}  // namespace oper
