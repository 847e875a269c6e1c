// How many bags of a batch have which length.
//
// Nearly all bags are short, so short lengths are counted in a directly indexed array, in four
// copies, as runs of equal lengths would else wait for one address; the others are sorted. Columns
// of which all bags have one length, or at most one id, need no pass over their lengths.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "oper/profiling/count.h"

namespace oper {

struct BagLength {
  int64_t length;
  int64_t bags;
};

class BagLengthCounts {
 public:
  template <typename Id>
  void add(const IdColumn<Id>& column, int64_t samples) {
    if (column.shortest == column.longest) {
      add_equal(column.shortest, samples);
    } else if (column.longest == 1) {
      add_equal(0, samples - column.size);
      add_equal(1, column.size);
    } else {
      add_mixed(column.lengths, samples);
    }
  }

  // Lengths ascending, each with its bags.
  std::vector<BagLength> sorted() {
    std::vector<BagLength> found;
    for (int32_t length = 0; length < kShort && !short_.empty(); ++length) {
      int64_t bags = 0;
      for (int32_t lane = 0; lane < kLanes; ++lane) bags += short_[lane * kShort + length];
      if (bags > 0) found.push_back({length, bags});
    }
    for (const int32_t length : long_) found.push_back({length, 1});
    found.insert(found.end(), runs_.begin(), runs_.end());
    std::sort(found.begin(), found.end(),
              [](const BagLength& a, const BagLength& b) { return a.length < b.length; });
    size_t last = 0;
    for (size_t n = 1; n < found.size(); ++n) {
      if (found[n].length == found[last].length)
        found[last].bags += found[n].bags;
      else
        found[++last] = found[n];
    }
    if (!found.empty()) found.resize(last + 1);
    return found;
  }

 private:
  static constexpr int32_t kShort = 256;
  static constexpr int32_t kLanes = 4;

  void add_equal(int64_t length, int64_t bags) {
    if (bags > 0) runs_.push_back({length, bags});
  }

  void add_mixed(const int32_t* lengths, int64_t bags) {
    if (short_.empty()) short_.assign(static_cast<size_t>(kLanes) * kShort, 0);
    const auto one = [this](int32_t lane, int32_t length) {
      if (length < kShort)
        ++short_[lane * kShort + length];
      else
        long_.push_back(length);
    };
    int64_t bag = 0;
    for (; bag + kLanes <= bags; bag += kLanes)
      for (int32_t lane = 0; lane < kLanes; ++lane) one(lane, lengths[bag + lane]);
    for (; bag < bags; ++bag) one(0, lengths[bag]);
  }

  std::vector<int64_t> short_;
  std::vector<int32_t> long_;
  std::vector<BagLength> runs_;  // of columns whose bags need no pass
};

// How many bags of each length the columns have together.
template <typename Id>
std::vector<BagLength> count_bag_lengths(const std::vector<IdColumn<Id>>& columns,
                                         int64_t samples) {
  BagLengthCounts counts;
  for (const auto& column : columns) counts.add(column, samples);
  return counts.sorted();
}

}  // namespace oper
