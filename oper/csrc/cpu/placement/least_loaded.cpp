// torch.ops.oper.least_loaded and rows_to_least_loaded: partitions, or rows, one after the other to
// the rank with the least load; the lowest rank in ties.

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

#include "cpu/common/arguments.h"

namespace oper {
namespace {

// Ranks by load, the least first.
template <typename Load>
class Loads {
 public:
  explicit Loads(std::vector<std::pair<Load, int64_t>> loads) : heap_(std::move(loads)) {
    std::make_heap(heap_.begin(), heap_.end(), std::greater<>());
  }

  int64_t least() const { return heap_.front().second; }
  const std::vector<std::pair<Load, int64_t>>& all() const { return heap_; }

  void add_to_least(Load more) {
    std::pop_heap(heap_.begin(), heap_.end(), std::greater<>());
    heap_.back().first += more;
    std::push_heap(heap_.begin(), heap_.end(), std::greater<>());
  }

 private:
  std::vector<std::pair<Load, int64_t>> heap_;
};

// The rank of each piece of `work` [P]; a rank's load is its work times `inverse_share` [M], and
// ranks where that is 0 get none.
at::Tensor least_loaded(const at::Tensor& work, const at::Tensor& inverse_share) {
  const double* const amount = elements<double>(work, "work");
  const double* const inverse = elements<double>(inverse_share, "inverse_share");
  std::vector<std::pair<double, int64_t>> none;
  for (int64_t rank = 0; rank < inverse_share.numel(); ++rank)
    if (inverse[rank] > 0) none.emplace_back(0.0, rank);
  OPER_CHECK_VALUE(!none.empty() || work.numel() == 0, "inverse_share: no rank has a share");
  Loads<double> loads(std::move(none));
  at::Tensor ranks = at::empty({work.numel()}, at::kLong);
  int64_t* const rank_of = ranks.data_ptr<int64_t>();
  for (int64_t p = 0; p < work.numel(); ++p) {
    rank_of[p] = loads.least();
    loads.add_to_least(amount[p] * inverse[loads.least()]);
  }
  return ranks;
}

// How many of `rows` items of equal `size` > 0 each rank gets when one after the other goes to the
// rank with the least load, whatever the rows.
//
// The k-th item of rank j comes at level load[j] + k·size; the `rows` items with the smallest
// levels are given. At the water level T (a rank below it is filled up to it), rank j gets
// ⌈(T - load[j]) / size⌉ items or one fewer: that fewer first, the rest by their levels.
std::vector<int64_t> water_fill(const std::vector<int64_t>& load, int64_t rows, int64_t size) {
  const int64_t ranks = static_cast<int64_t>(load.size());
  std::vector<int64_t> sorted = load;
  std::sort(sorted.begin(), sorted.end());
  int64_t poured = rows * size, level = 0;
  for (int64_t below = 0; below < ranks; ++below) {
    if (below && static_cast<__int128>(sorted[below]) * below >= poured) break;
    poured += sorted[below];
    level = poured / (below + 1);
  }
  std::vector<int64_t> given(ranks);
  std::vector<std::pair<int64_t, int64_t>> levels(ranks);
  int64_t left = rows;
  for (int64_t rank = 0; rank < ranks; ++rank) {
    const int64_t above = level - load[rank];
    given[rank] = above > 0 ? (above + size - 1) / size - 1 : 0;
    left -= given[rank];
    levels[rank] = {load[rank] + given[rank] * size, rank};
  }
  for (Loads<int64_t> loads(std::move(levels)); left > 0; --left) {
    ++given[loads.least()];
    loads.add_to_least(size);
  }
  return given;
}

// Cells [3, N]: of class, rank and rows. Load is counted in accesses; rows without any go round.
at::Tensor rows_to_least_loaded(const at::Tensor& rows, const at::Tensor& accesses, int64_t ranks) {
  const int64_t classes = rows.numel();
  const int64_t* const rows_of = elements<int64_t>(rows, "rows");
  const int64_t* const accesses_of = elements<int64_t>(accesses, classes, "accesses");
  check_size(ranks, 1, kMostThings, "ranks");
  std::vector<std::pair<int64_t, int64_t>> none(ranks);
  for (int64_t rank = 0; rank < ranks; ++rank) none[rank] = {0, rank};
  Loads<int64_t> loads(std::move(none));
  std::vector<int64_t> class_of, rank_of, rows_given;
  const auto give = [&](int64_t c, int64_t rank, int64_t n) {
    class_of.push_back(c);
    rank_of.push_back(rank);
    rows_given.push_back(n);
  };
  int64_t total = 0;
  std::vector<int64_t> load(ranks);
  for (int64_t c = 0; c < classes; ++c) {
    const int64_t n = rows_of[c], size = accesses_of[c];
    check_size(n, 0, kMostRows, "rows");
    check_size(size, 0, kMostBytes, "accesses");
    total += product(n, size, "accesses");
    check_size(total, 0, kMostBytes, "accesses of all rows");
    if (size == 0) {
      const int64_t share = n / ranks, rest = n % ranks;
      for (int64_t r = 0; r < ranks; ++r)
        give(c, r, share + ((r - c % ranks + ranks) % ranks < rest));
    } else if (n <= ranks) {
      for (int64_t k = 0; k < n; ++k) {
        give(c, loads.least(), 1);
        loads.add_to_least(size);
      }
    } else {
      for (const auto& [held, rank] : loads.all()) load[rank] = held;
      const std::vector<int64_t> given = water_fill(load, n, size);
      std::vector<std::pair<int64_t, int64_t>> filled(ranks);
      for (int64_t r = 0; r < ranks; ++r) {
        give(c, r, given[r]);
        filled[r] = {load[r] + given[r] * size, r};
      }
      loads = Loads<int64_t>(std::move(filled));
    }
  }
  at::Tensor cells = at::empty({3, static_cast<int64_t>(class_of.size())}, at::kLong);
  int64_t* to = cells.data_ptr<int64_t>();
  for (const auto* column : {&class_of, &rank_of, &rows_given})
    to = std::copy(column->begin(), column->end(), to);
  return cells;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(oper, m) {
  m.def("least_loaded(Tensor work, Tensor inverse_share) -> Tensor");
  m.def("rows_to_least_loaded(Tensor rows, Tensor accesses, int ranks) -> Tensor");
}

TORCH_LIBRARY_IMPL(oper, CPU, m) {
  m.impl("least_loaded", least_loaded);
  m.impl("rows_to_least_loaded", rows_to_least_loaded);
}

}  // namespace oper
