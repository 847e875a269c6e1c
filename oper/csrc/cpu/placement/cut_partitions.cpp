// torch.ops.oper.cut_partitions: runs of rows bounded in bytes and in accesses (§4.1).

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <cstdint>
#include <tuple>
#include <vector>

#include "cpu/common/arguments.h"

namespace oper {
namespace {

// `repeat` runs of `rows` rows of a class, in partitions from `partition` on.
struct Runs {
  std::vector<int64_t> class_index, rows, partition, repeat;

  void add(int64_t c, int64_t n, int64_t first, int64_t times) {
    class_index.push_back(c);
    rows.push_back(n);
    partition.push_back(first);
    repeat.push_back(times);
  }
};

// `repeat` partitions in a row that are full, and whether of accesses or of bytes.
struct Closed {
  std::vector<int64_t> bytes, accesses, access_bounded, repeat;

  void add(int64_t b, int64_t a, bool by_accesses, int64_t times) {
    bytes.push_back(b);
    accesses.push_back(a);
    access_bounded.push_back(by_accesses);
    repeat.push_back(times);
  }
};

at::Tensor stacked(const std::vector<int64_t>& a, const std::vector<int64_t>& b,
                   const std::vector<int64_t>& c, const std::vector<int64_t>& d) {
  const int64_t size = static_cast<int64_t>(a.size());
  at::Tensor out = at::empty({4, size}, at::kLong);
  int64_t* to = out.data_ptr<int64_t>();
  for (const auto* row : {&a, &b, &c, &d}) to = std::copy(row->begin(), row->end(), to);
  return out;
}

// Rows of `rows[c]`, `memory[c]` bytes and `accesses[c]` each; the walk is over classes, so that
// its time does not depend on the number of rows.
std::tuple<at::Tensor, at::Tensor> cut_partitions(const at::Tensor& rows, const at::Tensor& memory,
                                                  const at::Tensor& accesses, int64_t limit_bytes,
                                                  int64_t limit_accesses) {
  const int64_t classes = rows.numel();
  const int64_t* const rows_of = elements<int64_t>(rows, "rows");
  const int64_t* const bytes_of = elements<int64_t>(memory, classes, "memory");
  const int64_t* const accesses_of = elements<int64_t>(accesses, classes, "accesses");
  check_size(limit_bytes, 1, kMostBytes, "limit_bytes");
  check_size(limit_accesses, 1, kMostBytes, "limit_accesses");
  Runs runs;
  Closed closed;
  int64_t begun = 0, held_bytes = 0, held_accesses = 0;
  for (int64_t c = 0; c < classes; ++c) {
    const int64_t m = bytes_of[c], f = accesses_of[c];
    check_size(rows_of[c], 0, kMostRows, "rows");
    check_size(m, 1, kMostRows, "memory");
    check_size(f, 0, kMostBytes, "accesses");
    for (int64_t left = rows_of[c]; left > 0;) {
      const int64_t by_bytes = (limit_bytes - held_bytes) / m;
      const int64_t by_accesses = f ? (limit_accesses - held_accesses) / f : left;
      const int64_t fit = std::min({left, by_bytes, by_accesses});
      if (fit == 0 && held_bytes) {
        closed.add(held_bytes, held_accesses, by_accesses < by_bytes, 1);
        ++begun;
        held_bytes = held_accesses = 0;
        continue;
      }
      if (held_bytes || fit == left) {
        runs.add(c, fit, begun, 1);
        held_bytes += fit * m;
        held_accesses += fit * f;
        left -= fit;
        continue;
      }
      // A row above a limit is a partition of its own; of other rows, as many as fit, again and
      // again. The last rows of the class share a partition with the next class.
      const bool above = fit == 0;
      const bool by = above ? f > limit_accesses : by_accesses < by_bytes;
      const int64_t take = above ? 1 : fit;
      const int64_t repeat = above ? left : (left - 1) / take;
      runs.add(c, take, begun, repeat);
      closed.add(take * m, take * f, by, repeat);
      begun += repeat;
      left -= repeat * take;
    }
  }
  if (held_bytes) closed.add(held_bytes, held_accesses, false, 1);
  return {stacked(runs.class_index, runs.rows, runs.partition, runs.repeat),
          stacked(closed.bytes, closed.accesses, closed.access_bounded, closed.repeat)};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(oper, m) {
  m.def(
      "cut_partitions(Tensor rows, Tensor memory, Tensor accesses, int limit_bytes,"
      " int limit_accesses) -> (Tensor runs, Tensor closed)");
}

TORCH_LIBRARY_IMPL(oper, CPU, m) { m.impl("cut_partitions", cut_partitions); }

}  // namespace oper
