// Grouping: samples that share rows to the same worker (beyond the papers).
//
// A score adds up what each sample would transmit by itself, and so counts a row twice that two
// samples of one worker share. What a batch transmits is a sum over its distinct rows, each by the
// set U of workers that train it:
//
//     now    a pull by each worker of U without the latest copy, and a push if the tier lacks it
//     later  if U is one worker, a push when another one trains the row next: not sure. If they are
//            several, the push of each, and one more pull, as nobody has the latest copy then
//
// The search starts from an assignment and exchanges pairs of samples while that lowers the sum.
// Which sample of the other worker to exchange with is looked up in the marginal costs of the last
// pass, which may be old by now; whether it pays is computed anew.
#pragma once

#include <algorithm>
#include <cstdlib>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace oper {

// What is known of a row of the batch.
struct RowCost {
  uint64_t latest;       // the workers with the latest copy
  double bytes;
  double push;           // seconds of the push by the worker that has it, or 0 if the tier has it too
};

class Grouping {
 public:
  // Samples s read rows [offsets[s], offsets[s + 1]) of `rows`, which number `costs`.
  Grouping(const int32_t* rows, const int64_t* offsets, int64_t samples,
           std::vector<RowCost> costs, const double* seconds_per_byte, int workers)
      : rows_(rows),
        offsets_(offsets),
        samples_(samples),
        workers_(workers),
        costs_(std::move(costs)),
        seconds_(seconds_per_byte, seconds_per_byte + workers),
        held_(costs_.size() * workers),
        trainers_(costs_.size()),
        marginal_(samples * workers) {
    for (const double s : seconds_) mean_ += s / workers;
  }

  // Exchange samples of `assignment` in so many passes over them; how often it paid.
  int64_t improve(int64_t* assignment, int64_t passes) {
    std::vector<std::vector<int64_t>> of_worker(workers_);
    std::vector<int64_t> place(samples_);
    for (int64_t s = 0; s < samples_; ++s) {
      place[s] = static_cast<int64_t>(of_worker[assignment[s]].size());
      of_worker[assignment[s]].push_back(s);
      add(s, assignment[s]);
    }
    int64_t exchanged = 0;
    for (int64_t pass = 0; pass < passes; ++pass) {
      for (int64_t s = 0; s < samples_; ++s) {
        remove(s, assignment[s]);
        marginal(s, &marginal_[s * workers_]);
        add(s, assignment[s]);
      }
      for (int64_t s = 0; s < samples_; ++s) {
        const int64_t from = assignment[s];
        remove(s, from);
        double* const mine = &marginal_[s * workers_];
        marginal(s, mine);
        int64_t best = -1;
        double least = -kLeastGain;
        for (int64_t to = 0; to < workers_; ++to) {
          if (to == from) continue;
          const double moved = mine[to] - mine[from];
          if (moved >= least + most_gain_) continue;
          for (const int64_t other : of_worker[to]) {
            const double* const its = &marginal_[other * workers_];
            if (moved + its[from] - its[to] < least) {
              least = moved + its[from] - its[to];
              best = other;
            }
          }
        }
        if (best < 0) {
          add(s, from);
          continue;
        }
        const int64_t to = assignment[best];
        // Anew: s is nowhere now, and the other where it was.
        double* const its = &marginal_[best * workers_];
        remove(best, to);
        marginal(best, its);
        const double stay_other = its[to];
        add(best, to);
        marginal(s, mine);
        const double before = stay_other + mine[from];
        remove(best, to);
        const double first = its[from];
        add(best, from);
        marginal(s, mine);
        if (first + mine[to] < before - kLeastGain) {
          add(s, to);
          std::swap(of_worker[from][place[s]], of_worker[to][place[best]]);
          std::swap(place[s], place[best]);
          std::swap(assignment[s], assignment[best]);
          ++exchanged;
        } else {
          remove(best, from);
          add(best, to);
          add(s, from);
        }
      }
    }
    return exchanged;
  }

 private:
  static constexpr double kLeastGain = 1e-12;
  static double env(const char* n, double d) { const char* v = std::getenv(n); return v ? std::atof(v) : d; }
  double kSolePush = env("G_SOLE", 0.7), kJoin = env("G_JOIN", 1.0);

  void add(int64_t s, int64_t w) {
    for (int64_t n = offsets_[s]; n < offsets_[s + 1]; ++n)
      if (held_[rows_[n] * workers_ + w]++ == 0) trainers_[rows_[n]] |= uint64_t{1} << w;
  }
  void remove(int64_t s, int64_t w) {
    for (int64_t n = offsets_[s]; n < offsets_[s + 1]; ++n)
      if (--held_[rows_[n] * workers_ + w] == 0) trainers_[rows_[n]] &= ~(uint64_t{1} << w);
  }

  // What the sample, which is nowhere, adds to the sum on each worker.
  void marginal(int64_t s, double* cost) const {
    std::fill_n(cost, workers_, 0.0);
    for (int64_t n = offsets_[s]; n < offsets_[s + 1]; ++n) {
      const RowCost& row = costs_[rows_[n]];
      const uint64_t others = trainers_[rows_[n]];
      const bool pushed = row.push == 0 || (others & ~row.latest);
      const bool none = others == 0, one = !none && (others & (others - 1)) == 0;
      double joined = 0;
      if (one) {
        const double first = seconds_[__builtin_ctzll(others)];
        joined = (1 - kSolePush) * first + kJoin * mean_;
      }
      for (int w = 0; w < workers_; ++w) {
        const uint64_t bit = uint64_t{1} << w;
        if (others & bit) continue;
        double more = none ? kSolePush * seconds_[w] : seconds_[w] + joined;
        if (!(row.latest & bit)) more += seconds_[w];
        double seconds = more * row.bytes;
        if (!pushed && !(row.latest & bit)) seconds += row.push;
        cost[w] += seconds;
      }
    }
  }

  const int32_t* rows_;
  const int64_t* offsets_;
  int64_t samples_;
  int workers_;
  std::vector<RowCost> costs_;
  std::vector<double> seconds_;
  double mean_ = 0, most_gain_ = 1e300;
  std::vector<uint16_t> held_;  // [rows, M] samples of each worker
  std::vector<uint64_t> trainers_;
  std::vector<double> marginal_;  // [samples, M]
};

}  // namespace oper
