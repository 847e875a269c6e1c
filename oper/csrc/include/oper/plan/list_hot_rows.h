// The two passes over the counters that place rows: `list_hot_rows` lists the hot ones in the
// bitmap, `copy_and_sum` copies their counters out and sums what the striped ones carry on each
// rank.
//
// All functions work on one chunk of one table (chunks begin at a line), and write only what is
// that chunk's own, so that chunks may run in any order.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "oper/plan/bitmap.h"

namespace oper {

struct Marked {
  int64_t above = 0;  // rows with more accesses than the cut
  int64_t equal = 0;  // rows with as many
};

// Set the bits of rows with more than `cut` accesses; rows [0, rows) of the chunk.
template <typename Counter>
Marked mark_above(const Counter* accesses, int64_t rows, int64_t cut, Line* lines) {
  const bool all = cut < 0;
  const bool none = cut >= 0 && static_cast<uint64_t>(cut) >= std::numeric_limits<Counter>::max();
  const Counter limit =
      all || none ? std::numeric_limits<Counter>::max() : static_cast<Counter>(cut);
  const bool has_equal = !all && static_cast<uint64_t>(cut) == static_cast<uint64_t>(limit);
  Marked marked;
  uint8_t hot[64] = {};
  for (int64_t begin = 0; begin < rows; begin += 64) {
    const int64_t size = std::min<int64_t>(64, rows - begin);
    const Counter* counters = accesses + begin;
    uint32_t equal = 0;
    // Bytes first, as compilers turn that loop into vectors; eight of them are a product's bits.
    for (int64_t n = 0; n < size; ++n) hot[n] = counters[n] > limit || all;
    for (int64_t n = 0; n < size; ++n) equal += counters[n] == limit;
    uint64_t word = 0;
    for (int64_t n = 0; n < size; n += 8) {
      uint64_t eight;
      std::memcpy(&eight, hot + n, 8);
      word |= (eight * 0x0102040810204080u >> 56) << n;
    }
    if (size < 64) word &= (uint64_t{1} << size) - 1;
    lines[begin / kRowsPerLine].words[begin / 64 % kWordsPerLine] = word;
    marked.above += __builtin_popcountll(word);
    marked.equal += has_equal ? equal : 0;
  }
  return marked;
}

// Set the bits of the first `quota` rows with exactly `cut` accesses.
template <typename Counter>
void mark_equal(const Counter* accesses, int64_t rows, int64_t cut, int64_t quota, Line* lines) {
  for (int64_t row = 0; row < rows && quota > 0; ++row) {
    if (static_cast<uint64_t>(accesses[row]) != static_cast<uint64_t>(cut)) continue;
    lines[row / kRowsPerLine].words[row / 64 % kWordsPerLine] |= uint64_t{1} << (row % 64);
    --quota;
  }
}

// What the cost model says of a row: the chance that a rank touches it (OPER, §3.2), and how often
// it will be accessed, over how often it was; of a row that never was, how often.
struct RowValues {
  double touched;
  double weight;
  double expected;  // accesses of a row that each of its samples accesses once
};

// The values of rows by the number of samples that contain them: a table's, `samples_with_row`
// ascending.
class ValuesOfSamples {
 public:
  ValuesOfSamples(const int64_t* samples_with_row, const double* touched, const double* weight,
                  int64_t size)
      : samples_(samples_with_row),
        size_(size),
        direct_(kDirect, kUnknown) {
    values_.reserve(size);
    for (int64_t n = 0; n < size; ++n) {
      const auto samples = static_cast<double>(samples_with_row[n]);
      values_.push_back({touched[n], weight[n], (samples > 0 ? samples : 1) * weight[n]});
      as_counted_ &= weight[n] == (samples_with_row[n] > 0 ? 1 : 0);
      if (samples_with_row[n] < kDirect) direct_[samples_with_row[n]] = values_[n];
    }
  }

  // Whether rows are expected to be accessed as often as they were: all weights are 1.
  bool as_counted() const { return as_counted_; }

  const RowValues& operator()(uint64_t samples_with_row) const {
    return samples_with_row < kDirect ? direct_[samples_with_row] : search(samples_with_row);
  }

 private:
  static constexpr int64_t kDirect = 4096;
  static constexpr RowValues kUnknown{std::numeric_limits<double>::quiet_NaN(), 0, 0};

  const RowValues& search(uint64_t samples_with_row) const {
    const auto* end = samples_ + size_;
    const auto* found = std::lower_bound(samples_, end, static_cast<int64_t>(samples_with_row));
    if (found == end || *found != static_cast<int64_t>(samples_with_row)) return kUnknown;
    return values_[found - samples_];
  }

  const int64_t* samples_;
  int64_t size_;
  bool as_counted_ = true;
  std::vector<RowValues> values_;
  std::vector<RowValues> direct_;
};

// Where a table's striped rows go: the c-th to rank order[(c + rotation) mod period].
struct Pattern {
  const int32_t* order;
  int64_t period;
  int64_t rotation;
};

struct StripeSum {
  int64_t accesses = 0;
  double expected = 0;
  double touched = 0;
};

// One chunk of a table. `stripe_lines` are the lines that number the striped rows; they differ
// from `lines` where rows were listed after the stripes had been laid.
template <typename Counter>
struct ScanTask {
  const Counter* accesses;
  const Counter* samples_with_row;  // null: as accesses
  int64_t rows;
  const Line* lines;
  const Line* stripe_lines;
  int64_t striped_before;  // striped rows of the table before the chunk
};

// Copy the counters of listed rows; add the striped ones to `sums` and `rows`, [ranks] both.
template <typename Counter>
void copy_and_sum(const ScanTask<Counter>& task, const Pattern& pattern,
                  const ValuesOfSamples& of_samples, Counter* listed_accesses,
                  Counter* listed_samples_with_row, StripeSum* sums, int64_t* rows) {
  // Locals, as the compiler could not know that writing sums leaves the arguments alone.
  const Counter* const accesses = task.accesses;
  const Counter* const samples_with_row = task.samples_with_row ? task.samples_with_row : accesses;
  const int32_t* const order = pattern.order;
  const int64_t period = pattern.period;
  const int64_t first = (task.striped_before + pattern.rotation) % period;
  int64_t p = first, turns = 0;
  const auto advance = [&] {
    if (++p == period) {
      p = 0;
      ++turns;
    }
  };
  const bool as_counted = of_samples.as_counted();
  const bool bags = task.samples_with_row && !as_counted;
  const auto stripe = [&](int64_t row) {
    StripeSum& sum = sums[order[p]];
    sum.accesses += static_cast<int64_t>(accesses[row]);
    const RowValues& values = of_samples(samples_with_row[row]);
    if (bags)
      sum.expected +=
          static_cast<double>(samples_with_row[row] ? accesses[row] : 1) * values.weight;
    else if (!as_counted)
      sum.expected += values.expected;
    sum.touched += values.touched;
    advance();
  };
  for (int64_t begin = 0; begin < task.rows; begin += 64) {
    const int64_t end = std::min(begin + 64, task.rows);
    const int64_t line = begin / kRowsPerLine, word = begin / 64 % kWordsPerLine;
    uint64_t listed = task.lines[line].words[word];
    if (listed == 0) {
      for (int64_t row = begin; row < end; ++row) stripe(row);
      continue;
    }
    uint64_t outside = task.stripe_lines[line].words[word];
    for (int64_t row = begin; row < end; ++row, listed >>= 1, outside >>= 1) {
      if (!(listed & 1)) {
        stripe(row);
        continue;
      }
      *listed_accesses++ = accesses[row];
      if (listed_samples_with_row) *listed_samples_with_row++ = samples_with_row[row];
      if (outside & 1) continue;
      --rows[order[p]];  // a place in the stripes that its row has left
      advance();
    }
  }
  if (as_counted)
    for (int64_t n = 0; n < period; ++n)
      sums[order[n]].expected = static_cast<double>(sums[order[n]].accesses);
  for (int64_t n = 0; n < period; ++n)
    rows[order[n]] += turns + (n < p ? 1 : 0) - (n < first ? 1 : 0);
}

}  // namespace oper
