// Seeded bijections from popularity rank to row id, without an array.

#pragma once

#include <algorithm>
#include <cstdint>

#include "oper/common/bits.h"
#include "oper/common/random.h"

namespace oper {

// A seeded bijection of 0 .. size-1: rounds that are invertible on the next power of two, walked
// along the cycle until they hit the range again (Black and Rogaway 2002): at most two steps on
// average.
class Scatter {
 public:
  Scatter(int64_t size, uint64_t key) : size_(static_cast<uint64_t>(size)) {
    const int bits = bit_width(size_ - 1);
    mask_ = bits == 64 ? ~uint64_t{0} : (uint64_t{1} << bits) - 1;
    shift_ = (bits + 1) / 2;
    for (int round = 0; round < kRounds; ++round) {
      factor_[round] = mix(key + 2 * round) | 1;
      addend_[round] = mix(key + 2 * round + 1);
    }
  }

  int64_t operator()(int64_t index) const {
    if (size_ <= 1) return index;
    uint64_t word = static_cast<uint64_t>(index);
    do {
      for (int round = 0; round < kRounds; ++round) {
        word = (word * factor_[round] + addend_[round]) & mask_;
        word ^= word >> shift_;
      }
    } while (word >= size_);
    return static_cast<int64_t>(word);
  }

 private:
  static constexpr int kRounds = 4;
  uint64_t size_, mask_;
  int shift_;
  uint64_t factor_[kRounds], addend_[kRounds];
};

// How row ids follow popularity.
enum class Order : int64_t {
  kScattered = 0,  // not at all, as hashes do
  kFrequency = 1,  // the hottest row has id 0
  kAge = 2,        // ids count first appearances: hot rows come early, but not in order
};

// Popularity rank -> row id. Where a rank has `moved`, its popularity has gone to another row,
// by a bijection of its own: the drift of a log.
class Placement {
 public:
  Placement(int64_t rows, Order order, uint64_t key, bool moved)
      : rows_(rows),
        order_(order),
        key_(key),
        moved_(moved),
        scatter_(rows, key),
        move_(rows, mix(key)) {}

  int64_t operator()(int64_t rank) const {
    if (moved_) rank = move_(rank);
    if (order_ == Order::kFrequency) return rank;
    if (order_ == Order::kScattered) return scatter_(rank);
    // First appearances follow exponential waiting times: in logarithms, a row's place among them
    // deviates from its rank by 1.0 at exponent 1.05. Scattering in ranges of a factor of 4 and
    // again in ranges half a step further on deviates by 0.8.
    return scatter_in_range(scatter_in_range(rank, 0), 1);
  }

 private:
  int64_t scatter_in_range(int64_t rank, int offset) const {
    const int log2 = bit_width(static_cast<uint64_t>(rank + 1)) - 1;
    const int step = (log2 + offset) / 2;
    const int64_t begin = (int64_t{1} << std::max(0, 2 * step - offset)) - 1;
    const int64_t end = std::min(rows_, (int64_t{1} << (2 * step - offset + 2)) - 1);
    const uint64_t key = mix(key_ + static_cast<uint64_t>(2 * step + offset + 1));
    return begin + Scatter(end - begin, key)(rank - begin);
  }

  int64_t rows_;
  Order order_;
  uint64_t key_;
  bool moved_;
  Scatter scatter_, move_;
};

}  // namespace oper
