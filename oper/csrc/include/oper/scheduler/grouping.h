// Grouping: samples that share rows go to the same worker (beyond the papers).
//
// A score adds up what each sample would transmit by itself, and counts a row once for each of two
// samples of one worker that share it. What a batch transmits is a sum over its distinct rows, each
// by the set U of workers that train it:
//
//     now    a pull by each worker of U without the latest copy, and a push if the tier lacks it
//     later  a push by each worker of U if they are several: nobody has the latest copy then
//
// Pairs of samples are exchanged between workers while that lowers the sum, in a few passes over
// the samples. The partner is one that would gain most by the costs at the pass's beginning;
// whether the exchange pays is computed anew.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

namespace oper {

// What is known of a row of the batch.
struct RowCost {
  uint64_t latest;  // the workers with the latest copy
  float bytes;
  float push;  // seconds that its push takes, 0 where the tier has it
};

class Grouping {
 public:
  // Sample s reads rows [offsets[s], offsets[s + 1]) of `rows`, each a number of `costs`.
  Grouping(const std::vector<uint32_t>& rows, const int64_t* offsets, int64_t samples,
           const std::vector<RowCost>& costs, const double* seconds_per_byte, int workers)
      : rows_(rows),
        offsets_(offsets),
        samples_(samples),
        workers_(workers),
        lanes_((workers + kLanes - 1) / kLanes * kLanes),
        costs_(costs),
        seconds_(lanes_),
        held_(costs.size() * workers),
        trainers_(costs.size()),
        marginal_(samples * lanes_),
        partners_(workers * workers) {
    std::copy_n(seconds_per_byte, workers, seconds_.begin());
  }

  // Exchange samples of `assignment` [samples]; how often.
  int64_t improve(int64_t* assignment) {
    for (int64_t s = 0; s < samples_; ++s) add(s, assignment[s]);
    int64_t exchanged = 0;
    for (int pass = 0; pass < kPasses; ++pass) {
      choose_partners(assignment);
      for (int64_t s = 0; s < samples_; ++s) exchanged += exchange(s, assignment);
    }
    return exchanged;
  }

 private:
  static constexpr int kPasses = 2;       // four gain 1 % at most
  static constexpr ptrdiff_t kTries = 8;  // docs/design/dispatch-by-groups.md
  static constexpr int kLanes = 8;
  using Lanes = std::array<float, kLanes>;

  // 1 where a bit is set, of each set of eight workers.
  static const std::array<Lanes, 256>& ones() {
    static const auto made = [] {
      std::array<Lanes, 256> table{};
      for (int set = 0; set < 256; ++set)
        for (int w = 0; w < kLanes; ++w) table[set][w] = static_cast<float>(set >> w & 1);
      return table;
    }();
    return made;
  }

  void add(int64_t s, int64_t w) {
    for (int64_t n = offsets_[s]; n < offsets_[s + 1]; ++n)
      if (held_[rows_[n] * workers_ + w]++ == 0) trainers_[rows_[n]] |= uint64_t{1} << w;
  }
  void remove(int64_t s, int64_t w) {
    for (int64_t n = offsets_[s]; n < offsets_[s + 1]; ++n)
      if (--held_[rows_[n] * workers_ + w] == 0) trainers_[rows_[n]] &= ~(uint64_t{1} << w);
  }

  // What a sample that is nowhere would add to the sum on each worker.
  float* marginal(int64_t s) {
    float* const cost = &marginal_[s * lanes_];
    std::fill_n(cost, lanes_, 0.0f);
    for (int64_t n = offsets_[s]; n < offsets_[s + 1]; ++n) {
      const RowCost& row = costs_[rows_[n]];
      const uint64_t others = trainers_[rows_[n]];
      const float push = others & ~row.latest ? 0 : row.push;
      const float later = others ? row.bytes : 0;
      const bool one = others && (others & (others - 1)) == 0;
      const float first = one ? row.bytes * seconds_[__builtin_ctzll(others)] : 0;
      for (int lane = 0; lane < lanes_; lane += kLanes) {
        const Lanes& absent = ones()[~others >> lane & 255];
        const Lanes& pulls = ones()[~row.latest >> lane & 255];
        for (int w = 0; w < kLanes; ++w) {
          const float seconds = seconds_[lane + w];
          cost[lane + w] +=
              absent[w] * (pulls[w] * (row.bytes * seconds + push) + later * seconds + first);
        }
      }
    }
    return cost;
  }

  // For each ordered pair of workers, the samples of the first that would rather be on the second.
  void choose_partners(const int64_t* assignment) {
    for (auto& list : partners_) list.clear();
    for (int64_t s = 0; s < samples_; ++s) {
      const int64_t from = assignment[s];
      remove(s, from);
      const float* const cost = marginal(s);
      add(s, from);
      for (int64_t to = 0; to < workers_; ++to)
        if (to != from) partners_[from * workers_ + to].emplace_back(cost[from] - cost[to], s);
    }
    for (auto& list : partners_) std::sort(list.begin(), list.end());  // the last gains most
  }

  // Exchange the sample for one of another worker if that pays.
  bool exchange(int64_t s, int64_t* assignment) {
    const int64_t from = assignment[s];
    remove(s, from);
    const float* const cost = marginal(s);
    tried_.clear();
    for (int64_t w = 0; w < workers_; ++w) {
      if (w == from) continue;
      auto& list = partners_[w * workers_ + from];
      while (!list.empty() && assignment[list.back().second] != w) list.pop_back();
      // Not the first alone: two samples that share rows each want to go where the other is.
      const auto last = std::min<ptrdiff_t>(list.end() - list.begin(), kTries);
      for (auto at = list.rbegin(); at != list.rbegin() + last; ++at) {
        const auto& [gain, other] = *at;
        if (assignment[other] == w && cost[from] - cost[w] + gain > 0)
          tried_.emplace_back(cost[from] - cost[w] + gain, other);
      }
    }
    const ptrdiff_t tries = std::min<ptrdiff_t>(tried_.end() - tried_.begin(), kTries);
    std::partial_sort(tried_.begin(), tried_.begin() + tries, tried_.end(), std::greater<>());
    for (ptrdiff_t n = 0; n < tries; ++n)
      if (exchange_if_less(s, from, tried_[n].second, assignment)) return true;
    add(s, from);
    return false;
  }

  // The sample is nowhere: the other stays and it comes back, or they change places.
  bool exchange_if_less(int64_t s, int64_t from, int64_t other, int64_t* assignment) {
    const int64_t to = assignment[other];
    remove(other, to);
    const float* const its = marginal(other);
    const float its_stay = its[to], its_move = its[from];
    add(other, to);
    const float stay = its_stay + marginal(s)[from];
    remove(other, to);
    add(other, from);
    const float move = its_move + marginal(s)[to];
    if (move < stay * (1 - 1e-6f)) {
      add(s, to);
      std::swap(assignment[s], assignment[other]);
      return true;
    }
    remove(other, from);
    add(other, to);
    return false;
  }

  const std::vector<uint32_t>& rows_;
  const int64_t* offsets_;
  int64_t samples_;
  int64_t workers_;
  int lanes_;  // workers, rounded up
  const std::vector<RowCost>& costs_;
  std::vector<float> seconds_;
  std::vector<uint16_t> held_;      // [rows, M] samples of each worker
  std::vector<uint64_t> trainers_;  // [rows]
  std::vector<float> marginal_;     // [samples, lanes]
  std::vector<std::vector<std::pair<float, int64_t>>> partners_;  // [M, M]
  std::vector<std::pair<float, int64_t>> tried_;
};

}  // namespace oper
