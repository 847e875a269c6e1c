// Counters of all rows of tables, as the operators that read them take them.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <cstdint>

#include "cpu/common/arguments.h"

namespace oper {

// Counters of all rows of tables, or other ranges; `samples_with_row` is kept for some of them.
template <typename Counter>
struct RowCounters {
  const Counter* accesses;
  const Counter* samples_with_row;
  const int64_t* offsets;
  const int64_t* samples_with_row_offsets;

  const Counter* accesses_of(int64_t range) const { return accesses + offsets[range]; }

  // Null where a range keeps none, as it equals the accesses.
  const Counter* samples_with_row_of(int64_t range) const {
    return samples_with_row_offsets[range] < 0 ? nullptr
                                               : samples_with_row + samples_with_row_offsets[range];
  }
};

template <typename Counter>
RowCounters<Counter> row_counters(const at::Tensor& accesses, const at::Tensor& samples_with_row,
                                  const at::Tensor& offsets,
                                  const at::Tensor& samples_with_row_offsets) {
  const int64_t ranges = offsets.numel() - 1;
  OPER_CHECK_VALUE(ranges >= 0, "offsets: expected at least one element, got none");
  check_same_type(samples_with_row, "samples_with_row", accesses, "accesses");
  check_contiguous(samples_with_row, "samples_with_row");
  RowCounters<Counter> counters{
      static_cast<const Counter*>(accesses.const_data_ptr()),
      static_cast<const Counter*>(samples_with_row.const_data_ptr()),
      elements<int64_t>(offsets, ranges + 1, "offsets"),
      elements<int64_t>(samples_with_row_offsets, ranges, "samples_with_row_offsets"),
  };
  for (int64_t n = 0; n < ranges; ++n) {
    OPER_CHECK_VALUE(counters.offsets[n] >= 0 && counters.offsets[n + 1] >= counters.offsets[n],
                     "offsets: must ascend from 0 or more");
    const int64_t rows = counters.offsets[n + 1] - counters.offsets[n];
    OPER_CHECK_VALUE(counters.samples_with_row_offsets[n] <= samples_with_row.numel() - rows ||
                         counters.samples_with_row_offsets[n] < 0,
                     "samples_with_row: range ", n, " ends beyond its ", samples_with_row.numel(),
                     " counters");
  }
  OPER_CHECK_VALUE(counters.offsets[ranges] >= 0 && counters.offsets[ranges] <= accesses.numel(),
                   "accesses: ", accesses.numel(), " counters, and the offsets end at ",
                   counters.offsets[ranges]);
  return counters;
}

}  // namespace oper
