// torch.ops.oper.count_rows and leaving_rows: rows of a plan by their class and the column of their
// extent (oper/plan/row_locator.py), counted, and taken from such counts.

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <mutex>
#include <vector>

#include "cpu/common/arguments.h"
#include "cpu/common/parallel.h"
#include "oper/plan/address.h"

namespace oper {
namespace {

constexpr int64_t kRowsPerTask = 1 << 16;
// Of more cells each thread's own counts would not stay in its cache.
constexpr int64_t kMostCellsOfThreads = 1 << 18;

// The cells of rows: row n, of class c and extent e, is in cell c · columns + column[e].
struct Cells {
  const int64_t* address;
  const int64_t* column_of;
  const int32_t* row_class;
  int64_t extents, classes, columns;

  int64_t operator[](int64_t row) const {
    const int64_t extent = field_of(address[row]), c = row_class[row];
    check_index(extent, extents, "address", "extents");
    check_index(c, classes, "row_class", "classes");
    return c * columns + column_of[extent];
  }
};

Cells cells_of(const at::Tensor& address, const at::Tensor& column, const at::Tensor& row_class,
               const at::Tensor& counts) {
  OPER_CHECK_VALUE(counts.dim() == 2, "counts: expected [classes, columns], got ", counts.sizes());
  const Cells cells{elements<int64_t>(address, "address"),
                    elements<int64_t>(column, "column"),
                    elements<int32_t>(row_class, address.numel(), "row_class"),
                    column.numel(),
                    counts.size(0),
                    counts.size(1)};
  for (int64_t e = 0; e < cells.extents; ++e)
    check_index(cells.column_of[e], cells.columns, "column", "columns");
  return cells;
}

void count_rows(const at::Tensor& address, const at::Tensor& column, const at::Tensor& row_class,
                const at::Tensor& counts) {
  const Cells cells = cells_of(address, column, row_class, counts);
  const int64_t rows = address.numel(), size = counts.numel();
  int64_t* out = writable_elements<int64_t>(counts, size, "counts");
  if (size > kMostCellsOfThreads) {
    for (int64_t row = 0; row < rows; ++row) ++out[cells[row]];
    return;
  }
  std::mutex adding;
  share_out((rows + kRowsPerTask - 1) / kRowsPerTask, [&](const auto& next) {
    std::vector<int64_t> mine(size, 0);
    for (int64_t task = next(); task >= 0; task = next()) {
      const int64_t end = std::min(rows, (task + 1) * kRowsPerTask);
      for (int64_t row = task * kRowsPerTask; row < end; ++row) ++mine[cells[row]];
    }
    const std::lock_guard<std::mutex> lock(adding);
    for (int64_t cell = 0; cell < size; ++cell) out[cell] += mine[cell];
  });
}

at::Tensor leaving_rows(const at::Tensor& address, const at::Tensor& column,
                        const at::Tensor& row_class, const at::Tensor& left) {
  const Cells cells = cells_of(address, column, row_class, left);
  int64_t* rows_left = writable_elements<int64_t>(left, left.numel(), "left");
  std::vector<int64_t> taken;
  for (int64_t row = 0; row < address.numel(); ++row) {
    int64_t& of_cell = rows_left[cells[row]];
    if (of_cell <= 0) continue;
    --of_cell;
    taken.push_back(row);
  }
  at::Tensor found = at::empty({static_cast<int64_t>(taken.size())}, at::kLong);
  std::copy(taken.begin(), taken.end(), found.data_ptr<int64_t>());
  return found;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(oper, m) {
  m.def("count_rows(Tensor address, Tensor column, Tensor row_class, Tensor(a!) counts) -> ()");
  m.def("leaving_rows(Tensor address, Tensor column, Tensor row_class, Tensor(a!) left) -> Tensor");
}

TORCH_LIBRARY_IMPL(oper, CPU, m) {
  m.impl("count_rows", count_rows);
  m.impl("leaving_rows", leaving_rows);
}

}  // namespace oper
