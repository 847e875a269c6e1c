// The records of rows: one a row, which holds a bit for each of M workers, so that a batch looks a
// row up once for all of them, and one for each worker's copy of it.
//
// A batch is first looked up: its rows get numbers, and are known until it was trained. A row that
// nobody caches and no batch reads is forgotten, and its number used again.
//
// What the synchronisation keeps of a row, RowState, and of each copy, CopyState, lies beside what
// the caches keep: a batch touches thousands of rows that are in no processor's cache, and each
// costs a line for the row and one for its copies.
//
// Address: width << 56 | anything, such as owner << 40 | slot.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "oper/scheduler/growing_array.h"
#include "oper/scheduler/row_index.h"

namespace oper {

using RowNumber = RowIndex::Number;
using Workers = uint64_t;  // a bit for each

inline int width_of(uint64_t address) { return static_cast<int>(address >> 56); }

// f(worker) for each worker of a set.
template <typename F>
void for_each(Workers set, const F& f) {
  for (; set; set &= set - 1) f(__builtin_ctzll(set));
}

template <typename RowState, typename CopyState>
class RowRecords {
 public:
  static constexpr int kMostWorkers = 64;
  static constexpr int64_t kAhead = 16;  // rows, far enough to hide a miss

  // Bytes of a row's record, and of each worker's copy of it whether there is one or not.
  static constexpr int64_t bytes_of_row() { return sizeof(Row); }
  static constexpr int64_t bytes_of_copy() { return sizeof(Copy); }

  int workers() const { return workers_; }
  RowNumber rows() const { return static_cast<RowNumber>(rows_.size()); }
  // Whether a number below rows() is that of a row: those of forgotten rows are free.
  bool known(RowNumber row) const { return rows_[row].address != kForgotten; }
  int width(RowNumber row) const { return width_of(rows_[row].address); }
  uint64_t address(RowNumber row) const { return rows_[row].address; }
  Workers cached(RowNumber row) const { return rows_[row].cached; }
  Workers trainers(RowNumber row) const { return rows_[row].trainers; }

  // What the synchronisation keeps: RowState{} of a row that was not known, and CopyState{} of a
  // copy that came into a cache.
  RowState& state(RowNumber row) { return rows_[row].state; }
  const RowState& state(RowNumber row) const { return rows_[row].state; }
  CopyState& copy(RowNumber row, int worker) { return copy_of(row, worker).state; }
  const CopyState& copy(RowNumber row, int worker) const {
    return copies_[static_cast<size_t>(row) * workers_ + worker].state;
  }

  // The number of a row, RowIndex::kNone of one that is not known.
  RowNumber find(uint64_t address) const { return index_.find(address); }

  // Rows at the addresses `from` [size], which are known, are at `to` from now on, where none are
  // but those that are given here. Their numbers stay.
  void rename(const uint64_t* from, const uint64_t* to, size_t size) {
    std::vector<RowNumber> renamed(size);
    for (size_t n = 0; n < size; ++n) renamed[n] = find(from[n]);
    index_.rename(from, to, size);
    for (size_t n = 0; n < size; ++n) rows_[renamed[n]].address = to[n];
  }

  // What follows reads and writes of a row, ahead of it: first of all workers, then of trainers.
  void prefetch(RowNumber row) const { __builtin_prefetch(&rows_[row]); }
  void prefetch_copies(RowNumber row) const {
    for_each(rows_[row].trainers,
             [&](int w) { __builtin_prefetch(&copies_[static_cast<size_t>(row) * workers_ + w]); });
  }

  // f(row) for each row that a worker caches.
  template <typename F>
  void for_each_cached(const F& f) const {
    for (RowNumber row = 0; row < rows(); ++row)
      if (rows_[row].cached) f(row);
  }

 protected:
  explicit RowRecords(int workers) : workers_(workers) {}

  // What Shelves::look_up returns; room for how the rows will be used is made there.
  void number_rows(const int64_t* addresses, const int64_t* offsets, int64_t samples,
                   RowNumber* rows, int64_t* positions, int64_t* ends) {
    ++prepared_;
    const int64_t size = offsets[samples];
    int64_t found = 0;
    ends[0] = 0;
    RowNumber numbers[kAhead];  // of the addresses from n on
    for (int64_t n = 0; n < std::min(size, kAhead); ++n) numbers[n] = number_of(addresses[n]);
    for (int64_t s = 0; s < samples; ++s) {
      next_stamp();
      for (int64_t n = offsets[s]; n < offsets[s + 1]; ++n) {
        const RowNumber number = numbers[n % kAhead];
        if (n + 2 * kAhead < size)
          index_.prefetch(static_cast<uint64_t>(addresses[n + 2 * kAhead]));
        if (n + kAhead < size) {
          numbers[n % kAhead] = number_of(addresses[n + kAhead]);
          prefetch(numbers[n % kAhead]);
        }
        Row& row = rows_[number];
        row.prepared = prepared_;
        rows[found] = number;
        positions[found] = n;
        found += row.stamp != stamp_;
        row.stamp = stamp_;
      }
      ends[s + 1] = found;
    }
  }

  static constexpr uint64_t kForgotten = ~uint64_t{0};

  struct Row {
    uint64_t address = kForgotten;
    Workers cached = 0;
    Workers trainers = 0;   // of the batch that is trained
    uint32_t stamp = 0;     // the last sample that was looked up with it
    uint32_t prepared = 0;  // the last batch that was looked up with it, modulo 2^32
    RowState state = {};
  };

  struct Copy {
    uint32_t last_use = 0;  // uses of the worker so far, modulo 2^32, for LRU
    CopyState state = {};
  };

  Row& record(RowNumber row) { return rows_[row]; }
  const Row& record(RowNumber row) const { return rows_[row]; }
  Copy& copy_of(RowNumber row, int worker) {
    return copies_[static_cast<size_t>(row) * workers_ + worker];
  }
  void prefetch_copy(RowNumber row, int worker) const {
    __builtin_prefetch(&copies_[static_cast<size_t>(row) * workers_ + worker]);
  }
  size_t copies() const { return copies_.size(); }

  // A number that no record has as its stamp.
  uint32_t new_stamp() {
    next_stamp();
    return stamp_;
  }

  // The row is in no cache any more: it may be forgotten.
  void left(RowNumber row) { left_.push_back(row); }

  // The batch was trained. Rows that nobody needs are forgotten.
  void forget() {
    ++trained_;
    for (size_t n = 0; n < left_.size(); ++n) {
      if (n + 2 * kAhead < left_.size()) prefetch(left_[n + 2 * kAhead]);
      if (n + kAhead < left_.size()) index_.prefetch(rows_[left_[n + kAhead]].address);
      Row& row = rows_[left_[n]];
      if (row.cached || row.prepared - trained_ - 1 < prepared_ - trained_ ||
          row.address == kForgotten)
        continue;
      index_.remove(row.address);
      row.address = kForgotten;
    }
    left_.clear();
  }

 private:
  void next_stamp() {
    if (++stamp_) return;
    for (Row& row : rows_) row.stamp = 0;
    stamp_ = 1;
  }

  // The number of an address, a new one if it has none.
  RowNumber number_of(int64_t given) {
    const auto address = static_cast<uint64_t>(given);
    const auto [number, added] = index_.find_or_add(address);
    if (added) {
      if (number == rows_.size()) {
        rows_.extend(1);
        copies_.extend(workers_);
      }
      rows_[number] = Row{address};
    }
    return number;
  }

  int workers_;
  RowIndex index_;
  GrowingArray<Row> rows_;
  GrowingArray<Copy> copies_;  // [rows, M]
  std::vector<RowNumber> left_;
  uint32_t stamp_ = 0, prepared_ = 0, trained_ = 0;
};

}  // namespace oper
