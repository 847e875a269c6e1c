// Assignment: which worker trains which sample, each worker as many as it has room for.
//
// A transportation problem with few sinks. `assign_exactly`: every sample first goes to its
// cheapest worker, which is the optimum without room, of equals to the one with the most room left;
// then one sample at a time leaves a worker with too many along the cheapest path of moves from
// worker to worker to one with room, which keeps the assignment the cheapest one for the numbers of
// samples that the workers have. The cheapest move from one worker to another is at the top of a
// heap of the samples there, one for each ordered pair, and beside it in a matrix, of which a path
// changes the rows of its workers alone (successive shortest paths; the paths are over M workers,
// not over samples).
//
// `assign_partly` (ESD's HybridDis) does so with the samples for which the choice matters most.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <utility>
#include <vector>

namespace oper {

// Which of several equally cheap workers a sample gets: a number for each sample, from a seed, or
// the first of them without one.
class Ties {
 public:
  Ties() = default;
  explicit Ties(uint64_t seed) : seed_(seed), drawn_(true) {}

  int64_t choose(int64_t sample, int64_t equals) const {
    return drawn_ ? static_cast<int64_t>(mixed(static_cast<uint64_t>(sample)) % equals) : 0;
  }

 private:
  // SplitMix64's (Steele, Lea & Flood, OOPSLA 2014).
  uint64_t mixed(uint64_t sample) const {
    uint64_t x = seed_ + (sample + 1) * 0x9e3779b97f4a7c15u;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return x ^ x >> 31;
  }

  uint64_t seed_ = 0;
  bool drawn_ = false;
};

// Samples `order` [n] with costs [., M], in this order, each to its cheapest worker with room;
// `room` [M], which sums to at least n, is used up.
inline void assign_in_order(const double* costs, const std::vector<int64_t>& order, int64_t workers,
                            std::vector<int64_t>& room, const Ties& ties, int64_t* assignment) {
  constexpr double kFull = std::numeric_limits<double>::infinity();
  constexpr int64_t kLanes = 8;  // minima that are taken side by side
  const int64_t padded = (workers + kLanes - 1) / kLanes * kLanes;
  std::vector<double> full(padded, kFull), cost(padded, 0.0);
  for (int64_t w = 0; w < workers; ++w) full[w] = room[w] ? 0 : kFull;
  for (const int64_t s : order) {
    const double* const of_sample = costs + s * workers;
    for (int64_t w = 0; w < workers; ++w) cost[w] = of_sample[w] + full[w];
    for (int64_t w = workers; w < padded; ++w) cost[w] = kFull;
    double lanes[kLanes];
    std::copy_n(cost.begin(), kLanes, lanes);
    for (int64_t first = kLanes; first < padded; first += kLanes)
      for (int64_t n = 0; n < kLanes; ++n)
        lanes[n] = cost[first + n] < lanes[n] ? cost[first + n] : lanes[n];
    const double least = *std::min_element(lanes, lanes + kLanes);
    const auto equals = std::count(cost.begin(), cost.end(), least);
    int64_t best = -1;
    for (int64_t left = ties.choose(s, equals); left >= 0; --left)
      while (cost[++best] != least) {
      }
    full[best] = --room[best] ? 0 : kFull;
    assignment[s] = best;
  }
}

class ExactAssignment {
 public:
  ExactAssignment(const double* costs, int64_t samples, int64_t workers, int64_t* assignment)
      : costs_(samples * workers),
        samples_(samples),
        workers_(workers),
        assignment_(assignment),
        moves_(workers * workers),
        least_(workers * workers, kNever) {
    // Whole numbers: sums of differences are exact, so that no circle of moves is ever a gain.
    double largest = 0;
    for (int64_t n = 0; n < samples * workers; ++n) largest = std::max(largest, std::abs(costs[n]));
    const double scale = largest > 0 ? 0x1p40 / largest : 0;
    for (int64_t n = 0; n < samples * workers; ++n) {
      const double scaled = costs[n] * scale;  // std::llround is a call for each
      costs_[n] = static_cast<int64_t>(scaled + (scaled < 0 ? -0.5 : 0.5));
    }
  }

  // The assignment of the least total cost; `room` [M] sums to at least the samples.
  void assign(std::vector<int64_t> room) {
    std::vector<std::vector<int64_t>> samples_of(workers_);
    for (int64_t s = 0; s < samples_; ++s) {
      const int64_t* const cost = costs_.data() + s * workers_;
      int64_t best = 0;
      for (int64_t w = 1; w < workers_; ++w)
        if (cost[w] < cost[best] || (cost[w] == cost[best] && room[w] > room[best])) best = w;
      assignment_[s] = best;
      samples_of[best].push_back(s);
      --room[best];
    }
    if (std::none_of(room.begin(), room.end(), [](int64_t n) { return n < 0; })) return;
    for (int64_t from = 0; from < workers_; ++from)
      for (int64_t to = 0; to < workers_; ++to)
        if (from != to) fill(samples_of[from], from, to);
    while (std::any_of(room.begin(), room.end(), [](int64_t n) { return n < 0; })) {
      const auto path = cheapest_path(room);
      ++room[path.front()];
      --room[path.back()];
      // From the end, so that no sample moves twice.
      for (size_t n = path.size() - 1; n > 0; --n) move(path[n - 1], path[n]);
    }
  }

 private:
  static constexpr int64_t kNever = std::numeric_limits<int64_t>::max() / 4;
  using Move = std::pair<int64_t, int64_t>;  // what it costs more, the sample

  int64_t difference(int64_t sample, int64_t from, int64_t to) const {
    return costs_[sample * workers_ + to] - costs_[sample * workers_ + from];
  }

  void fill(const std::vector<int64_t>& samples, int64_t from, int64_t to) {
    auto& heap = moves_[from * workers_ + to];
    heap.reserve(samples.size());
    for (const int64_t s : samples) heap.emplace_back(difference(s, from, to), s);
    std::make_heap(heap.begin(), heap.end(), std::greater<>());
    least_[from * workers_ + to] = heap.empty() ? kNever : heap.front().first;
  }

  // The workers on the cheapest path from one with too many samples to one with room.
  std::vector<int64_t> cheapest_path(const std::vector<int64_t>& room) {
    std::vector<int64_t> distance(workers_, kNever);
    std::vector<int64_t> before(workers_, -1);
    for (int64_t w = 0; w < workers_; ++w)
      if (room[w] < 0) distance[w] = 0;
    // Some moves may cost less than nothing, but no circle of them does. A worker is looked at
    // again where its distance has changed.
    std::vector<char> changed(workers_);
    for (int64_t w = 0; w < workers_; ++w) changed[w] = room[w] < 0;
    for (bool any = true; any;) {
      any = false;
      for (int64_t from = 0; from < workers_; ++from) {
        if (!changed[from]) continue;
        changed[from] = 0;
        const int64_t* const more = &least_[from * workers_];
        for (int64_t to = 0; to < workers_; ++to) {
          if (distance[from] + more[to] >= distance[to]) continue;
          distance[to] = distance[from] + more[to];
          before[to] = from;
          changed[to] = 1;
          any = true;
        }
      }
    }
    int64_t end = -1;
    for (int64_t w = 0; w < workers_; ++w)
      if (room[w] > 0 && (end < 0 || distance[w] < distance[end])) end = w;
    std::vector<int64_t> path{end};
    while (before[path.back()] >= 0) path.push_back(before[path.back()]);
    std::reverse(path.begin(), path.end());
    return path;
  }

  void move(int64_t from, int64_t to) {
    const int64_t sample = moves_[from * workers_ + to].front().second;
    assignment_[sample] = to;
    // Heaps whose cheapest sample is not there any more lose it.
    for (int64_t next = 0; next < workers_; ++next) {
      auto& heap = moves_[from * workers_ + next];
      while (!heap.empty() && assignment_[heap.front().second] != from) {
        std::pop_heap(heap.begin(), heap.end(), std::greater<>());
        heap.pop_back();
      }
      if (next != from) least_[from * workers_ + next] = heap.empty() ? kNever : heap.front().first;
    }
    for (int64_t next = 0; next < workers_; ++next) {
      if (next == to) continue;
      auto& heap = moves_[to * workers_ + next];
      heap.emplace_back(difference(sample, to, next), sample);
      std::push_heap(heap.begin(), heap.end(), std::greater<>());
      least_[to * workers_ + next] = heap.front().first;
    }
  }

  std::vector<int64_t> costs_;
  int64_t samples_, workers_;
  int64_t* assignment_;
  std::vector<std::vector<Move>> moves_;  // [M, M]
  std::vector<int64_t> least_;            // [M, M] what the first of them costs, kNever for none
};

// Of the samples [n] the `exactly` ones with the largest regret, the second least less the least
// cost, get the assignment of the least total cost within `room` [M]; the others come in order.
inline void assign_partly(const double* costs, int64_t samples, int64_t workers,
                          std::vector<int64_t> room, int64_t exactly, int64_t* assignment) {
  using Regret = std::pair<double, int64_t>;  // negative, so that the first of equals comes first
  std::vector<Regret> regrets(samples);
  for (int64_t s = 0; s < samples; ++s) {
    const double* const cost = costs + s * workers;
    double least = cost[0], second = std::numeric_limits<double>::infinity();
    for (int64_t w = 1; w < workers; ++w) {
      second = std::min(second, std::max(least, cost[w]));
      least = std::min(least, cost[w]);
    }
    regrets[s] = {least - second, s};
  }
  std::nth_element(regrets.begin(), regrets.begin() + exactly, regrets.end());
  std::vector<char> is_chosen(samples);
  for (int64_t n = 0; n < exactly; ++n) is_chosen[regrets[n].second] = 1;
  std::vector<int64_t> others;
  std::vector<int64_t> chosen;
  std::vector<double> of_chosen;
  of_chosen.reserve(exactly * workers);
  for (int64_t s = 0; s < samples; ++s) {
    (is_chosen[s] ? chosen : others).push_back(s);
    if (is_chosen[s])
      of_chosen.insert(of_chosen.end(), costs + s * workers, costs + (s + 1) * workers);
  }
  std::vector<int64_t> found(exactly);
  ExactAssignment(of_chosen.data(), exactly, workers, found.data()).assign(room);
  for (int64_t n = 0; n < exactly; ++n) {
    assignment[chosen[n]] = found[n];
    --room[found[n]];
  }
  assign_in_order(costs, others, workers, room, Ties(), assignment);
}

}  // namespace oper
