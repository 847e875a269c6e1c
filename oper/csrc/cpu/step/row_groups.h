// The groups of a batch's rows, or of their gradients: those of one bucket and owner.
//
// Of groups [2, G + 1] the first line counts the rows before each group, and the second the values
// before the gradients of each: RowGradients of oper/runtime/tables/row_gradients.py.
#pragma once

#include <cstdint>

#include "cpu/common/arguments.h"

namespace oper {

// Rows [begin, end), and where the first one's gradient begins.
struct RowGroup {
  int64_t begin, end;
  int64_t value;

  int64_t rows() const { return end - begin; }
};

// The number of groups that a tensor describes, which must be [2, groups + 1].
inline int64_t count_groups(const at::Tensor& groups, const char* name) {
  OPER_CHECK_VALUE(groups.dim() == 2 && groups.size(0) == 2 && groups.size(1) > 0, name,
                   ": expected [2, groups + 1], got ", groups.sizes());
  return groups.size(1) - 1;
}

// The number of groups that a tensor describes; [first, last) must be some of them.
inline int64_t check_groups(const at::Tensor& groups, int64_t first, int64_t last) {
  const int64_t count = count_groups(groups, "groups");
  OPER_CHECK_INDEX(0 <= first && first <= last && last <= count, "groups: ", first, " to ", last,
                   " of ", count);
  return count;
}

// Groups [first, last) of those of `most_rows` rows, with gradients of `dim` values each, of which
// there are `most_values`.
inline RowGroup row_group(const at::Tensor& groups, int64_t first, int64_t last, int64_t dim,
                          int64_t most_rows, int64_t most_values) {
  const int64_t count = check_groups(groups, first, last);
  const auto* const before = elements<int64_t>(groups, "groups");
  const RowGroup found{before[first], before[last], before[count + 1 + first]};
  OPER_CHECK_VALUE(0 <= found.begin && found.begin <= found.end && found.end <= most_rows,
                   "groups: rows ", found.begin, " to ", found.end, " of ", most_rows);
  const int64_t values = product(found.rows(), dim, "groups");
  OPER_CHECK_VALUE(values == 0 || (found.value >= 0 && values <= most_values - found.value),
                   "groups: ", values, " values from ", found.value, " on, of ", most_values);
  return found;
}

}  // namespace oper
