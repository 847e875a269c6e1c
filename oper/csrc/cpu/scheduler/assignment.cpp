// torch.ops.oper.assign_in_order and assign_exactly: samples to workers by their costs.

#include "oper/scheduler/assignment.h"

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <cmath>
#include <numeric>
#include <vector>

#include "cpu/common/arguments.h"

namespace oper {
namespace {

constexpr int64_t kMostSamples = int64_t{1} << 22;

struct Given {
  const double* costs;
  int64_t samples, workers;
  std::vector<int64_t> room;
};

Given checked(const at::Tensor& costs, const at::Tensor& room) {
  TORCH_CHECK_VALUE(costs.dim() == 2, "costs: shape ", costs.sizes(),
                    ", and [samples, workers] was needed");
  check_size(costs.size(0), 0, kMostSamples, "samples");
  check_size(costs.size(1), 1, kMostSamples, "workers");
  const double* const values = elements<double>(costs, "costs");
  for (int64_t n = 0; n < costs.numel(); ++n)
    TORCH_CHECK_VALUE(std::isfinite(values[n]), "costs: all must be finite");
  const int64_t* const most = elements<int64_t>(room, costs.size(1), "room");
  int64_t sum = 0;
  for (int64_t w = 0; w < costs.size(1); ++w) {
    check_size(most[w], 0, kMostSamples, "room");
    sum += most[w];
  }
  TORCH_CHECK_VALUE(sum >= costs.size(0), "room: for ", sum, " samples, and there are ",
                    costs.size(0));
  return {values, costs.size(0), costs.size(1), {most, most + costs.size(1)}};
}

// The worker of each sample [n], for costs [n, M] and room [M].
at::Tensor in_order(const at::Tensor& costs, const at::Tensor& room) {
  Given given = checked(costs, room);
  at::Tensor assignment = at::empty({given.samples}, at::kLong);
  assign_in_order(given.costs, given.samples, given.workers, given.room,
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

}  // namespace

TORCH_LIBRARY_FRAGMENT(oper, m) {
  m.def("assign_in_order(Tensor costs, Tensor room) -> Tensor");
  m.def("assign_exactly(Tensor costs, Tensor room) -> Tensor");
}

TORCH_LIBRARY_IMPL(oper, CPU, m) {
  m.impl("assign_in_order", in_order);
  m.impl("assign_exactly", exactly);
}

}  // namespace oper
