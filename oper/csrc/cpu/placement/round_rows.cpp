// torch.ops.oper.give_leftovers and whole_by_shares: whole rows of each class from shares of holder
// sets (oper/planner/class_placement/rounding.py).

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <tuple>
#include <vector>

#include "cpu/common/arguments.h"

namespace oper {
namespace {

// What keeps a whole number that was computed from being rounded down.
constexpr double kRounding = 1e-9;

const double* shares_of(const at::Tensor& shares, int64_t classes) {
  OPER_CHECK_VALUE(shares.dim() == 2 && shares.size(0) == classes, "shares: expected [", classes,
                   ", holder sets], got ", shares.sizes());
  return elements<double>(shares, "shares");
}

void check_finite(const double* values, int64_t size, const char* name) {
  for (int64_t n = 0; n < size; ++n)
    OPER_CHECK_VALUE(values[n] >= 0 && std::isfinite(values[n]), name, ": ", values[n], " is none");
}

// Adds the `left[c]` rows of each class to `counts` [C, G], and their traffic to `load` [G]: to the
// holder sets that have fewest of the leftovers for their share, then least load for their share.
void give_leftovers(const at::Tensor& left, const at::Tensor& shares, const at::Tensor& traffic,
                    const at::Tensor& counts, const at::Tensor& load) {
  const int64_t classes = left.numel();
  const int64_t* const left_of = elements<int64_t>(left, "left");
  const double* const share_of = shares_of(shares, classes);
  const int64_t sets = shares.size(1);
  const double* const traffic_of = elements<double>(traffic, classes, "traffic");
  elements<int64_t>(counts, shares.numel(), "counts");
  elements<double>(load, sets, "load");
  int64_t* const count = counts.mutable_data_ptr<int64_t>();
  double* const loads = load.mutable_data_ptr<double>();
  check_finite(traffic_of, classes, "traffic");
  check_finite(loads, sets, "load");
  // A holder set's turn comes by its share of the leftovers, which `given` counts.
  std::vector<double> given(sets, 0);
  std::vector<std::tuple<double, double, int64_t>> order;  // turn, load for its share, holder set
  for (int64_t c = 0; c < classes; ++c) {
    if (left_of[c] <= 0) continue;
    const double* const share = share_of + c * sets;
    order.clear();
    for (int64_t g = 0; g < sets; ++g)
      if (share[g] > 0)
        order.emplace_back(std::floor(given[g] / share[g] / static_cast<double>(sets) + kRounding),
                           loads[g] / share[g], g);
    const auto n = std::min<int64_t>(left_of[c], static_cast<int64_t>(order.size()));
    std::nth_element(order.begin(), order.begin() + n, order.end());
    for (int64_t k = 0; k < n; ++k) {
      const int64_t g = std::get<2>(order[k]);
      ++count[c * sets + g];
      loads[g] += traffic_of[c];
      given[g] += 1;
    }
  }
}

// Whole numbers near exact[g] that sum to `total`: the largest remainders are rounded up. Where
// nothing is wanted anywhere, near `otherwise`.
class WholeRows {
 public:
  explicit WholeRows(int64_t sets) : scaled_(sets), order_(sets) {}

  void round(const double* exact, const double* otherwise, int64_t total, int64_t* whole) {
    const int64_t sets = static_cast<int64_t>(scaled_.size());
    double held = std::accumulate(exact, exact + sets, 0.0);
    if (held == 0) {
      exact = otherwise;
      held = std::accumulate(exact, exact + sets, 0.0);
    }
    const double factor = held > 0 ? static_cast<double>(total) / held : 1;
    const double more = held > 0 ? 0 : static_cast<double>(total) / static_cast<double>(sets);
    double sum = 0;
    for (int64_t g = 0; g < sets; ++g) {
      scaled_[g] = held > 0 ? exact[g] * factor : exact[g] + more;
      sum += scaled_[g];
    }
    OPER_CHECK_VALUE(sum <= static_cast<double>(4 * kMostRows), "shares: no rows come of them");
    int64_t given = 0;
    for (int64_t g = 0; g < sets; ++g) {
      whole[g] = static_cast<int64_t>(std::floor(scaled_[g] + kRounding));
      given += whole[g];
      order_[g] = {static_cast<double>(whole[g]) - scaled_[g], g};
    }
    const int64_t missing = total - given;
    if (missing == 0) return;
    std::sort(order_.begin(), order_.end());
    for (int64_t n = 0; n < std::min(missing, sets); ++n) ++whole[order_[n].second];
    for (int64_t n = std::max<int64_t>(sets + missing, 0); n < sets; ++n) --whole[order_[n].second];
  }

 private:
  std::vector<double> scaled_;
  std::vector<std::pair<double, int64_t>> order_;
};

// Rows [C, G]. What rounding takes from a holder set is made up for by the next classes: of hot
// classes, which have no more rows than there are holder sets, in traffic, as they decide a rank's
// load; of the others in rows of the same bucket, as they decide its memory.
at::Tensor whole_by_shares(const at::Tensor& rows, const at::Tensor& shares,
                           const at::Tensor& bucket, const at::Tensor& traffic, int64_t buckets) {
  const int64_t classes = rows.numel();
  const int64_t* const rows_of = elements<int64_t>(rows, "rows");
  const double* const share_of = shares_of(shares, classes);
  const int64_t sets = shares.size(1);
  const int64_t* const bucket_of = elements<int64_t>(bucket, classes, "bucket");
  const double* const traffic_of = elements<double>(traffic, classes, "traffic");
  check_size(buckets, 0, kMostThings, "buckets");
  check_size(product(buckets, sets, "buckets"), 0, kMostRows, "buckets and holder sets");
  check_finite(traffic_of, classes, "traffic");
  check_finite(share_of, shares.numel(), "shares");
  at::Tensor counts = at::empty({classes, sets}, at::kLong);
  int64_t* const count = counts.data_ptr<int64_t>();
  std::vector<double> owed_traffic(sets, 0), owed_rows(buckets * sets, 0), exact(sets);
  std::vector<double> wanted(sets), bounded(sets);
  WholeRows whole_rows(sets);
  for (int64_t c = 0; c < classes; ++c) {
    const int64_t n = rows_of[c];
    check_size(n, 0, kMostRows, "rows");
    check_index(bucket_of[c], buckets, "bucket", "buckets");
    const double total = static_cast<double>(n), weight = traffic_of[c];
    const double* const share = share_of + c * sets;
    int64_t* const whole = count + c * sets;
    for (int64_t g = 0; g < sets; ++g) exact[g] = total * share[g];
    if (n <= sets && weight > 0) {
      for (int64_t g = 0; g < sets; ++g) {
        wanted[g] = share[g] > 0 ? exact[g] + owed_traffic[g] / weight : 0;
        bounded[g] = std::fmin(std::fmax(wanted[g], 0), total);
      }
      whole_rows.round(bounded.data(), exact.data(), n, whole);
      for (int64_t g = 0; g < sets; ++g)
        owed_traffic[g] += (exact[g] - static_cast<double>(whole[g])) * weight;
    } else {
      double* const owed = owed_rows.data() + bucket_of[c] * sets;
      for (int64_t g = 0; g < sets; ++g) {
        wanted[g] = exact[g] + owed[g];
        bounded[g] = std::fmax(wanted[g], 0);
      }
      whole_rows.round(bounded.data(), exact.data(), n, whole);
      for (int64_t g = 0; g < sets; ++g) owed[g] = wanted[g] - static_cast<double>(whole[g]);
    }
  }
  return counts;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(oper, m) {
  m.def(
      "give_leftovers(Tensor left, Tensor shares, Tensor traffic, Tensor(a!) counts,"
      " Tensor(b!) load) -> ()");
  m.def(
      "whole_by_shares(Tensor rows, Tensor shares, Tensor bucket, Tensor traffic, int buckets)"
      " -> Tensor");
}

TORCH_LIBRARY_IMPL(oper, CPU, m) {
  m.impl("give_leftovers", give_leftovers);
  m.impl("whole_by_shares", whole_by_shares);
}

}  // namespace oper
