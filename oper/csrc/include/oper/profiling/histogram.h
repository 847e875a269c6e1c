// How many rows have which (accesses, samples with it): the classes of rows that a plan is made
// over.
//
// Nearly all rows of a log are cold, so small counts are counted in a directly indexed array, in
// four copies, as runs of equal counts would else wait for one address; the rest go to a hash
// table. Memory is a few tens of kilobytes a thread and the distinct pairs.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <vector>

#include "oper/common/count_hash_table.h"

namespace oper {

using PairCounts = PairTable<int64_t>;

template <typename Counter>
class ChunkHistogram {
 public:
  ChunkHistogram() : direct_(kLanes * kDirect, 0) {}

  // Count `rows` rows; `samples_with_row` null where it equals the accesses. At most 2^32 rows
  // between two calls of `drain`.
  void count(const Counter* accesses, const Counter* samples_with_row, int64_t rows) {
    if (samples_with_row)
      count_pairs(accesses, samples_with_row, rows);
    else
      count_singles(accesses, rows);
    bagged_ = samples_with_row != nullptr;
  }

  // Move what was counted into `total`.
  void drain(PairCounts& total) {
    for (uint32_t key = 0; key < kDirect; ++key) {
      int64_t rows = 0;
      for (uint32_t lane = 0; lane < kLanes; ++lane) rows += direct_[lane * kDirect + key];
      if (!rows) continue;
      if (bagged_)
        total.at(key / kSide, key % kSide) += rows;
      else
        total.at(key, key) += rows;
    }
    std::fill(direct_.begin(), direct_.end(), 0);
    for (const auto& entry : rest_.entries())
      total.at(entry.accesses, entry.samples_with_row) += entry.value;
    rest_.clear();
  }

 private:
  static constexpr uint32_t kLanes = 4;
  static constexpr uint32_t kSide = 64;
  static constexpr uint32_t kDirect = kSide * kSide;

  void count_singles(const Counter* accesses, int64_t rows) {
    const auto one = [this](uint32_t lane, Counter a) {
      if (a < kDirect)
        ++direct_[lane * kDirect + static_cast<uint32_t>(a)];
      else
        ++rest_.at(a, a);
    };
    int64_t row = 0;
    for (; row + kLanes <= rows; row += kLanes)
      for (uint32_t lane = 0; lane < kLanes; ++lane) one(lane, accesses[row + lane]);
    for (; row < rows; ++row) one(0, accesses[row]);
  }

  void count_pairs(const Counter* accesses, const Counter* samples_with_row, int64_t rows) {
    for (int64_t row = 0; row < rows; ++row) {
      const Counter a = accesses[row], c = samples_with_row[row];
      if (a < kSide && c < kSide)
        ++direct_[(row % kLanes) * kDirect + static_cast<uint32_t>(a * kSide + c)];
      else
        ++rest_.at(a, c);
    }
  }

  std::vector<uint32_t> direct_;
  PairCounts rest_;
  bool bagged_ = false;
};

// Entries by accesses, then samples_with_row, both descending.
inline std::vector<PairCounts::Entry> sorted_entries(const PairCounts& counts) {
  auto entries = counts.entries();
  std::sort(entries.begin(), entries.end(), [](const auto& a, const auto& b) {
    return a.accesses != b.accesses ? a.accesses > b.accesses
                                    : a.samples_with_row > b.samples_with_row;
  });
  return entries;
}

}  // namespace oper
