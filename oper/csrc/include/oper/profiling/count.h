// Counting a batch: accesses of each row, and the samples that contain it.
//
// The work on a table can be cut into parts by rows, so that threads share a large one: each part
// reads all ids and keeps those of its own blocks of rows. No two parts write to one counter, so
// increments are plain, and the counts do not depend on the threads. An id that the table has no
// row for is never written, only reported.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace oper {

// One column's ids of a batch: sample s has lengths[s] of them, or one where lengths is null.
template <typename Id>
struct IdColumn {
  const Id* values;
  int64_t size;
  const int32_t* lengths;
  int32_t shortest = 1;  // of its bags
  int32_t longest = 1;
};

// Part `index` of 2^bits: the blocks of rows whose number is `index` modulo 2^bits. Blocks are
// interleaved, as the hottest rows may lie together.
struct RowPart {
  uint64_t index = 0;
  int bits = 0;

  bool holds(uint64_t row) const {
    constexpr int kBlockBits = 10;  // few of the cache lines lie in two blocks
    return (row >> kBlockBits & ((uint64_t{1} << bits) - 1)) == index;
  }
};

// The ids of a column that its table has no row for.
struct BadIds {
  int64_t first = -1;
  int64_t count = 0;

  void add(int64_t position) {
    if (count++ == 0) first = position;
  }
};

// Counters of one table.
template <typename Counter>
struct TableCounters {
  Counter* accesses;
  Counter* samples_with_row;  // null where none are kept
  uint64_t rows;

  // Far enough ahead to hide a miss, near enough to stay in the first-level cache.
  static constexpr int64_t kAhead = 24;

  // Only what the part will write: a line fetched for writing is taken from the other threads.
  template <typename Id>
  void prefetch(const IdColumn<Id>& ids, int64_t position, RowPart part) const {
    if (position + kAhead >= ids.size) return;
    const auto row = static_cast<uint64_t>(static_cast<int64_t>(ids.values[position + kAhead]));
    if (row >= rows || !part.holds(row)) return;
    __builtin_prefetch(accesses + row, 1);
    if (samples_with_row) __builtin_prefetch(samples_with_row + row, 1);
  }
};

// The rows of one sample. A generation number in each slot empties the set in one step.
class SampleRows {
 public:
  // Make room for the rows of a sample that has `most` ids.
  void begin(int64_t most) {
    if (2 * static_cast<uint64_t>(most) > slots_.size()) {
      uint64_t size = 64;
      while (size < 2 * static_cast<uint64_t>(most)) size *= 2;
      slots_.assign(size, Slot{});
      generation_ = 0;
    }
    ++generation_;
  }

  // Whether the row is new to the sample.
  bool insert(uint64_t row) {
    const uint64_t mask = slots_.size() - 1;
    uint64_t at = (row * 0x9e3779b97f4a7c15u >> 32) & mask;
    for (; slots_[at].generation == generation_; at = (at + 1) & mask)
      if (slots_[at].row == row) return false;
    slots_[at] = {row, generation_};
    return true;
  }

 private:
  struct Slot {
    uint64_t row = 0;
    uint64_t generation = 0;
  };
  std::vector<Slot> slots_;
  uint64_t generation_ = 0;
};

// Count the accesses alone.
template <typename Id, typename Counter>
BadIds count_accesses(const IdColumn<Id>& ids, const TableCounters<Counter>& table, RowPart part) {
  BadIds bad;
  for (int64_t n = 0; n < ids.size; ++n) {
    table.prefetch(ids, n, part);
    const auto row = static_cast<uint64_t>(static_cast<int64_t>(ids.values[n]));
    if (row >= table.rows)
      bad.add(n);
    else if (part.holds(row))
      ++table.accesses[row];
  }
  return bad;
}

// The rows of a sample and of a bag of it.
struct SeenRows {
  SampleRows in_sample;
  SampleRows in_bag;
};

// Count accesses and samples with the row of a table that `columns` index together, one of them or
// `kSeveral`. `bad` has an element for each column. Lengths are not negative and sum to their
// column's size. Returns the sum over all bags of the part's distinct rows in each, of several
// columns; the bags of one are its samples, whose distinct rows are in the counters.
template <bool kSeveral, typename Id, typename Counter>
int64_t count_samples(const std::vector<IdColumn<Id>>& columns, int64_t samples,
                      const TableCounters<Counter>& table, RowPart part, SeenRows& seen,
                      BadIds* bad) {
  int64_t distinct = 0;
  SampleRows& in_sample = seen.in_sample;
  std::vector<int64_t> position(columns.size(), 0);
  for (int64_t sample = 0; sample < samples; ++sample) {
    int64_t ids_of_sample = 0;
    for (const auto& ids : columns) ids_of_sample += ids.lengths ? ids.lengths[sample] : 1;
    in_sample.begin(ids_of_sample);
    for (size_t c = 0; c < columns.size(); ++c) {
      const auto& ids = columns[c];
      const int64_t end = position[c] + (ids.lengths ? ids.lengths[sample] : 1);
      if constexpr (kSeveral) seen.in_bag.begin(end - position[c]);
      for (int64_t n = position[c]; n < end; ++n) {
        table.prefetch(ids, n, part);
        const auto row = static_cast<uint64_t>(static_cast<int64_t>(ids.values[n]));
        if (row >= table.rows) {
          bad[c].add(n);
        } else if (part.holds(row)) {
          ++table.accesses[row];
          if (in_sample.insert(row)) ++table.samples_with_row[row];
          // A bag of one id repeats none.
          if constexpr (kSeveral) distinct += end - position[c] == 1 || seen.in_bag.insert(row);
        }
      }
      position[c] = end;
    }
  }
  return distinct;
}

}  // namespace oper
