// Caches: which rows each of M workers caches, within a capacity for each row width, and which it
// trains.
//
// A batch is first looked up (row_records.h) and later assigned: `begin` says who trains what. Rows
// that a worker trains in the current batch do not leave its cache (eviction.h).
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "oper/scheduler/eviction.h"

namespace oper {

template <typename RowState, typename CopyState>
class Caches : public Shelves<RowState, CopyState> {
 public:
  using Shelves<RowState, CopyState>::kAhead;

  Caches(int workers, std::vector<int64_t> capacity, Policy policy)
      : Shelves<RowState, CopyState>(workers, std::move(capacity), policy),
        needed_(workers * this->widths()) {}

  // The next batch that was looked up is trained so: sample s, rows [offsets[s], offsets[s + 1]),
  // by worker assignment[s]. Workers come one after the other, with their samples in order: so each
  // of them could tell its rows to the others.
  void begin(const int32_t* rows, const int64_t* offsets, int64_t samples,
             const int64_t* assignment) {
    abandon();
    std::vector<int64_t> first(this->workers() + 1), by_worker(samples);
    for (int64_t s = 0; s < samples; ++s) ++first[assignment[s] + 1];
    for (int w = 0; w < this->workers(); ++w) first[w + 1] += first[w];
    for (int64_t s = 0; s < samples; ++s) by_worker[first[assignment[s]]++] = s;
    for (const int64_t s : by_worker)
      for (int64_t n = offsets[s]; n < offsets[s + 1]; ++n) {
        if (n + kAhead < offsets[samples]) this->prefetch(rows[n + kAhead]);
        auto& row = this->record(rows[n]);
        const Workers bit = Workers{1} << assignment[s];
        if (row.trainers & bit) continue;
        if (!row.trainers) batch_.push_back(rows[n]);
        row.trainers |= bit;
        ++needed_[assignment[s] * this->widths() + width_of(row.address)];
      }
  }

  // Nobody trains the batch after all.
  void abandon() {
    for (const RowNumber row : batch_) this->record(row).trainers = 0;
    batch_.clear();
    std::fill(needed_.begin(), needed_.end(), 0);
  }

  // The distinct rows of the batch that was begun, in the order of their first sample.
  const std::vector<RowNumber>& batch() const { return batch_; }

  // Rows of each width that each worker needs for the batch that was begun, [M, widths].
  const std::vector<int64_t>& needed() const { return needed_; }

  // The batch was trained. Rows that nobody needs are forgotten.
  void end() {
    abandon();
    this->forget();
    this->keep_in_order();
  }

 private:
  std::vector<int64_t> needed_;  // [M, widths]
  std::vector<RowNumber> batch_;
};

}  // namespace oper
