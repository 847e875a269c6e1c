// Which listed rows are found by a mark instead of a code: those of each table that lie on all
// ranks at positions that count them (oper/plan/row_codes.py).
#pragma once

#include <cstdint>
#include <vector>

#include "oper/plan/bitmap.h"
#include "oper/plan/row_codes.h"

namespace oper {

// The group of a table whose rows are found by marks, and how many they are.
struct InOrder {
  int64_t group = -1;  // -1: none
  int64_t rows = 0;
};

// The largest of the groups in question whose rows among `codes` have consecutive positions, in
// order; the first of equally large ones. `wanted` [groups] are 1 for groups in question.
template <typename Code>
InOrder largest_in_order(const Code* codes, int64_t rows, RowCodes row_codes,
                         const std::vector<uint8_t>& wanted) {
  struct Run {
    uint64_t next = 0;
    int64_t rows = 0;
    bool broken = false;
  };
  std::vector<Run> runs(wanted.size());
  for (int64_t row = 0; row < rows; ++row) {
    const uint64_t group = row_codes.group(codes[row]), position = row_codes.position(codes[row]);
    if (!wanted[group]) continue;
    Run& run = runs[group];
    run.broken |= run.rows > 0 && position != run.next;
    run.next = position + 1;
    ++run.rows;
  }
  InOrder found;
  for (size_t g = 0; g < runs.size(); ++g)
    if (!runs[g].broken && runs[g].rows > found.rows)
      found = {static_cast<int64_t>(g), runs[g].rows};
  return found;
}

// Mark the rows of `group` among the `lines` lines of a table's bitmap, whose rows have `codes`, in
// `marks`, and copy the codes of the others to `rest`, which is moved on. Returns the position of
// the first marked row; 0 where there is none.
template <typename Code>
int64_t mark_rows(const Code* codes, const Line* bitmap, int64_t lines, RowCodes row_codes,
                  int64_t group, Line* marks, Code*& rest) {
  int64_t first = -1;
  for (int64_t line = 0; line < lines; ++line) {
    for (int64_t word = 0; word < kWordsPerLine; ++word) {
      uint64_t marked = 0;
      for (uint64_t left = bitmap[line].words[word]; left; left &= left - 1) {
        const Code code = *codes++;
        if (static_cast<int64_t>(row_codes.group(code)) != group) {
          *rest++ = code;
          continue;
        }
        if (first < 0) first = static_cast<int64_t>(row_codes.position(code));
        marked |= left & (~left + 1);
      }
      marks[line].words[word] = marked;
    }
  }
  return first < 0 ? 0 : first;
}

}  // namespace oper
