// Assignment: which worker trains which sample, each worker as many as it has room for.
//
// A transportation problem with few sinks. `assign_exactly`: every sample first goes to its
// cheapest worker, which is the optimum without room; then one sample at a time leaves a worker
// with too many along the cheapest path of moves from worker to worker to one with room, which
// keeps the assignment the cheapest one for the numbers of samples that the workers have. The
// cheapest move from one worker to another is at the top of a heap of the samples there, one for
// each ordered pair (successive shortest paths; the paths are over M workers, not over samples).
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <utility>
#include <vector>

namespace oper {

// Samples [n] with costs [n, M], in order, each to its cheapest worker with room, the lowest number
// in ties; `room` [M], which sums to at least the samples, is used up.
inline void assign_in_order(const double* costs, int64_t samples, int64_t workers,
                            std::vector<int64_t>& room, int64_t* assignment) {
  for (int64_t s = 0; s < samples; ++s) {
    int64_t best = 0;
    while (room[best] == 0) ++best;
    for (int64_t w = best + 1; w < workers; ++w)
      if (room[w] > 0 && costs[s * workers + w] < costs[s * workers + best]) best = w;
    --room[best];
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
        moves_(workers * workers) {
    // Whole numbers: sums of differences are exact, so that no circle of moves is ever a gain.
    double largest = 0;
    for (int64_t n = 0; n < samples * workers; ++n) largest = std::max(largest, std::abs(costs[n]));
    const double scale = largest > 0 ? 0x1p40 / largest : 0;
    for (int64_t n = 0; n < samples * workers; ++n) costs_[n] = std::llround(costs[n] * scale);
  }

  // The assignment of the least total cost; `room` [M] sums to at least the samples.
  void assign(std::vector<int64_t> room) {
    std::vector<std::vector<int64_t>> samples_of(workers_);
    for (int64_t s = 0; s < samples_; ++s) {
      const int64_t* const cost = costs_.data() + s * workers_;
      assignment_[s] = std::min_element(cost, cost + workers_) - cost;
      samples_of[assignment_[s]].push_back(s);
      --room[assignment_[s]];
    }
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
  }

  // What the cheapest move costs, of a sample that is still there.
  int64_t cheapest(int64_t from, int64_t to) {
    auto& heap = moves_[from * workers_ + to];
    while (!heap.empty() && assignment_[heap.front().second] != from) {
      std::pop_heap(heap.begin(), heap.end(), std::greater<>());
      heap.pop_back();
    }
    return heap.empty() ? kNever : heap.front().first;
  }

  // The workers on the cheapest path from one with too many samples to one with room.
  std::vector<int64_t> cheapest_path(const std::vector<int64_t>& room) {
    std::vector<int64_t> distance(workers_, kNever);
    std::vector<int64_t> before(workers_, -1);
    for (int64_t w = 0; w < workers_; ++w)
      if (room[w] < 0) distance[w] = 0;
    // Some moves may cost less than nothing, but no circle of them does.
    for (bool changed = true; changed;) {
      changed = false;
      for (int64_t from = 0; from < workers_; ++from) {
        if (distance[from] == kNever) continue;
        for (int64_t to = 0; to < workers_; ++to) {
          const int64_t more = to == from ? kNever : cheapest(from, to);
          if (more == kNever || distance[from] + more >= distance[to]) continue;
          distance[to] = distance[from] + more;
          before[to] = from;
          changed = true;
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
    cheapest(from, to);  // drops the samples that left
    const int64_t sample = moves_[from * workers_ + to].front().second;
    assignment_[sample] = to;
    for (int64_t next = 0; next < workers_; ++next) {
      if (next == to) continue;
      auto& heap = moves_[to * workers_ + next];
      heap.emplace_back(difference(sample, to, next), sample);
      std::push_heap(heap.begin(), heap.end(), std::greater<>());
    }
  }

  std::vector<int64_t> costs_;
  int64_t samples_, workers_;
  int64_t* assignment_;
  std::vector<std::vector<Move>> moves_;  // [M, M]
};

}  // namespace oper
