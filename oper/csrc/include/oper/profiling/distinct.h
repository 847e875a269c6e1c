// How many distinct rows a batch reads: summed over ranks, each with its own part, and by all.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "oper/profiling/count.h"

namespace oper {

struct DistinctRows {
  int64_t of_ranks = 0;  // Σ over ranks of the rows a rank reads
  int64_t of_all = 0;    // rows that any rank reads
};

// Rows, each with the last rank that read it. Ranks come in order, so that is enough to tell
// whether a rank reads a row for the first time.
class RowReaders {
 public:
  explicit RowReaders(int64_t most) : slots_(capacity(most)) {}

  void add(uint64_t row, int64_t rank, DistinctRows& found) {
    const uint64_t mask = slots_.size() - 1;
    uint64_t at = (row * 0x9e3779b97f4a7c15u >> 32) & mask;
    while (slots_[at].rank >= 0 && slots_[at].row != row) at = (at + 1) & mask;
    Slot& slot = slots_[at];
    found.of_all += slot.rank < 0;
    found.of_ranks += slot.rank != rank;
    slot = {row, rank};
  }

 private:
  struct Slot {
    uint64_t row = 0;
    int64_t rank = -1;
  };

  static size_t capacity(int64_t most) {
    size_t size = 64;
    while (size < 2 * static_cast<size_t>(most)) size *= 2;
    return size;
  }

  std::vector<Slot> slots_;
};

// Rank r has samples [r·B/M, (r+1)·B/M) of the batch. `columns` index one table.
template <typename Id>
DistinctRows count_distinct(const std::vector<IdColumn<Id>>& columns, int64_t samples,
                            int64_t ranks) {
  int64_t most = 0;
  for (const auto& ids : columns) most += ids.size;
  RowReaders readers(most);
  DistinctRows found;
  std::vector<int64_t> position(columns.size(), 0);
  int64_t sample = 0;
  for (int64_t rank = 0; rank < ranks; ++rank) {
    const int64_t end = (rank + 1) * samples / ranks;
    for (size_t c = 0; c < columns.size(); ++c) {
      const auto& ids = columns[c];
      int64_t last = position[c] + (end - sample);
      if (ids.lengths) {
        last = position[c];
        for (int64_t s = sample; s < end; ++s) last += ids.lengths[s];
      }
      for (int64_t n = position[c]; n < last; ++n)
        readers.add(static_cast<uint64_t>(static_cast<int64_t>(ids.values[n])), rank, found);
      position[c] = last;
    }
    sample = end;
  }
  return found;
}

}  // namespace oper
