// From counts of rows to rows: the groups that listed rows are assigned to, and the codes that the
// address map reads.
#pragma once

#include <cstdint>
#include <vector>

#include "oper/plan/row_codes.h"

namespace oper {

// Gives the rows of each class to groups in turn, in the order they come: round robin over the
// groups that still lack rows of the class.
class RoundRobin {
 public:
  // `counts` [classes, groups] rows that each group gets of each class.
  RoundRobin(const int64_t* counts, int64_t classes, int64_t groups)
      : groups_(groups),
        left_(counts, counts + classes * groups),
        turn_(classes, -1),
        next_(classes * groups, -1) {
    for (int64_t c = 0; c < classes; ++c) {
      // Groups with rows of the class form a ring; turn_ is the group that had the last row.
      int64_t first = -1, last = -1;
      for (int64_t g = 0; g < groups; ++g) {
        if (left_[c * groups + g] <= 0) continue;
        if (first < 0)
          first = g;
        else
          next_[c * groups + last] = static_cast<int32_t>(g);
        last = g;
      }
      if (last < 0) continue;
      next_[c * groups + last] = static_cast<int32_t>(first);
      turn_[c] = static_cast<int32_t>(last);
    }
  }

  // The group of the next row of class c, or -1 where all counts are used up.
  int32_t next_group(int64_t c) {
    const int32_t last = turn_[c];
    if (last < 0) return -1;
    int32_t* next = next_.data() + c * groups_;
    const int32_t group = next[last];
    if (--left_[c * groups_ + group] > 0) {
      turn_[c] = group;
    } else if (group == last) {
      turn_[c] = -1;
    } else {
      next[last] = next[group];
    }
    return group;
  }

 private:
  int64_t groups_;
  std::vector<int64_t> left_;
  std::vector<int32_t> turn_;
  std::vector<int32_t> next_;
};

// The code of each row, positions counting a group's rows in the order they come.
// `position` [groups] are 0 at first.
template <typename Code>
void pack_codes(const int32_t* group, int64_t rows, RowCodes row_codes, uint64_t* position,
                Code* codes) {
  for (int64_t row = 0; row < rows; ++row)
    codes[row] = static_cast<Code>(
        row_codes.pack(static_cast<uint64_t>(group[row]), position[group[row]]++));
}

}  // namespace oper
