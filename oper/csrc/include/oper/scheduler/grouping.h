// Grouping: samples that share rows go to the same worker (beyond the papers).
//
// A score adds up what each sample would transmit by itself, and counts a row once for each of two
// samples of one worker that share it. What a batch transmits is a sum over its distinct rows, each
// by the set U of workers that train it:
//
//     now    a pull by each worker of U without the latest copy, and a push if the tier lacks it
//     later  a push by each worker of U if they are several: nobody has the latest copy then
//
// In a round the samples come in order, and each goes to the worker with room where it adds least
// to the sum, by where the samples before it are and, from the second round on, by where those
// after it were in the round before (streaming partitioning: Stanton & Kliot, KDD 2012, and
// Nishimura & Ugander, KDD 2013). From the fifth round on pairs of samples change places where that
// lowers the sum, which room does not hinder: the partner is one of those that would gain most by
// the costs at the round's beginning, and whether it pays is computed anew. The work is bounded by
// the rounds, and no clock is looked at: equal batches are grouped alike.
//
// Two kinds of rows decide nothing and are left out: those that most workers read whatever the
// assignment is, and those that one sample reads and nobody has the latest copy of, where links are
// equal. Where they are not, all samples would rather be on the fast ones, and the first would get
// them: there a worker has a price, which rises with each sample that it gets, so that the samples
// for which it matters most get the fast links. A round begins with the prices of the middle of the
// round before.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
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
  static constexpr int kMostWorkers = 64;

  // Sample s reads the distinct rows [offsets[s], offsets[s + 1]) of `rows`; cost_of(row) is a
  // RowCost. `places` has a zero for each row number, and is left so.
  template <typename CostOf>
  Grouping(const int32_t* rows, const int64_t* offsets, int64_t samples, const CostOf& cost_of,
           const double* seconds_per_byte, int workers, std::vector<uint32_t>& places)
      : samples_(samples),
        workers_(workers),
        seconds_(padded(workers)),
        bandwidth_(padded(workers)),
        fill_(padded(workers), kFull),
        gains_(padded(workers) / kLanes),
        ends_(samples + 1) {
    for (int w = 0; w < workers; ++w) {
      seconds_[w] = static_cast<float>(seconds_per_byte[w]);
      bandwidth_[w] = 1 / seconds_[w];
    }
    const float slowest = *std::max_element(seconds_.begin(), seconds_.begin() + workers);
    const float fastest = *std::min_element(seconds_.begin(), seconds_.begin() + workers);
    const int64_t size = offsets[samples];
    std::vector<int32_t> distinct;
    for (int64_t n = 0; n < size; ++n)
      if (places[rows[n]]++ == 0) distinct.push_back(rows[n]);
    double bytes = 0;
    for (const int32_t row : distinct) {
      const uint32_t samples_of = places[row];
      places[row] = 0;
      if (samples_of > static_cast<uint32_t>(kCommon * workers)) continue;
      const RowCost cost = cost_of(row);
      if (samples_of == 1 && !cost.latest && fastest == slowest) continue;
      rows_.push_back({0, cost.latest, cost.bytes, cost.push, 0});
      bytes += cost.bytes;
      places[row] = static_cast<uint32_t>(rows_.size());  // from 1 on
    }
    reads_.resize(size);
    size_t kept = 0;
    for (int64_t s = 0; s < samples; ++s) {
      for (int64_t n = offsets[s]; n < offsets[s + 1]; ++n) {
        reads_[kept] = places[rows[n]] - 1;
        kept += places[rows[n]] != 0;
      }
      ends_[s + 1] = static_cast<int64_t>(kept);
    }
    for (const int32_t row : distinct) places[row] = 0;
    held_.resize(rows_.size() * workers);
    if (rows_.empty()) return;
    const auto of_row = static_cast<float>(bytes / static_cast<double>(rows_.size()));
    const float of_sample = of_row * static_cast<float>(kept) / static_cast<float>(samples);
    tie_ = kTie * of_row;
    rise_ = kRise * of_sample * (slowest - fastest);
  }

  // The worker of each sample [samples] after so many rounds; `room` [M] sums to at least the
  // samples.
  void assign(const std::vector<int64_t>& room, int64_t rounds, int64_t* assignment) {
    std::vector<float> price(workers_);
    for (int64_t round = 0; round < rounds; ++round) {
      if (round < kStreamed)
        stream(room, round, price, assignment);
      else
        exchange(assignment);
    }
  }

 private:
  // Of M workers a row that more than 3 M samples read is left out. With 2 M and 4 M 64 x 512
  // samples transmit more, and 8 x 128 as much (docs/design/dispatch-by-groups.md).
  static constexpr int kCommon = 3;
  static constexpr float kTie = 1e-3f;  // of a row
  // How much a price rises over all samples of a worker, of what links make of a sample's rows.
  static constexpr float kRise = 4;
  static constexpr uint32_t kFew = 8;      // workers that are quicker gone through one by one
  static constexpr int64_t kStreamed = 4;  // rounds; the others are of exchanges
  static constexpr int64_t kTries = 8;     // partners of a sample
  // Of a pair of workers with m samples each so many partners are known: 4 m / M, four at least.
  static constexpr int64_t kPartners = 4;
  static constexpr int kLanes = 4;
  static constexpr float kFull = std::numeric_limits<float>::infinity();
  static_assert(kCommon * kMostWorkers < 256, "the samples of a row are counted in 8 bits");

  // They may alias floats, as one worker's and four workers' values are the same memory.
  using Lanes = float __attribute__((vector_size(16), may_alias));
  using Bits = int32_t __attribute__((vector_size(16), may_alias));

  using Partner = std::pair<float, int32_t>;  // what it would gain, the sample

  struct Row {
    uint64_t trainers;  // U, without the sample that is looked at
    uint64_t latest;
    float bytes;
    float push;
    uint32_t count;  // of U
  };

  static size_t padded(int workers) {
    return static_cast<size_t>(workers + kLanes - 1) / kLanes * kLanes;
  }

  // All bits of a lane where one is set, of each set of four workers.
  static const std::array<Bits, 1 << kLanes>& lanes_of() {
    static const auto made = [] {
      std::array<Bits, 1 << kLanes> table{};
      for (int set = 0; set < 1 << kLanes; ++set)
        for (int w = 0; w < kLanes; ++w) table[set][w] = set >> w & 1 ? -1 : 0;
      return table;
    }();
    return made;
  }

  template <typename F>
  static void for_each(uint64_t set, const F& f) {
    for (; set; set &= set - 1) f(__builtin_ctzll(set));
  }

  void add(int64_t s, int64_t w) {
    for (int64_t n = ends_[s]; n < ends_[s + 1]; ++n)
      if (held_[reads_[n] * workers_ + w]++ == 0) {
        Row& row = rows_[reads_[n]];
        row.trainers |= uint64_t{1} << w;
        ++row.count;
      }
  }
  void remove(int64_t s, int64_t w) {
    for (int64_t n = ends_[s]; n < ends_[s + 1]; ++n)
      if (--held_[reads_[n] * workers_ + w] == 0) {
        Row& row = rows_[reads_[n]];
        row.trainers &= ~(uint64_t{1} << w);
        --row.count;
      }
  }

  // Every sample goes where it adds least, in order.
  void stream(const std::vector<int64_t>& room, int64_t round, std::vector<float>& price,
              int64_t* assignment) {
    std::vector<int64_t> left = room;
    const auto taken = [&](int64_t w) {
      return static_cast<float>(room[w] - left[w]) / static_cast<float>(room[w]);
    };
    const auto set_fill = [&](int64_t w) {
      // Of equals the one with the most room.
      const float tie = tie_ * seconds_[w];
      fill_[w] = left[w] ? price[w] + (rise_ + tie) * taken(w) : kFull;
    };
    for (int64_t w = 0; w < workers_; ++w) set_fill(w);
    std::vector<float> middle = price;
    for (int64_t s = 0; s < samples_; ++s) {
      if (s == samples_ / 2)
        for (int64_t w = 0; w < workers_; ++w)
          if (room[w]) middle[w] += rise_ * taken(w);
      if (round) remove(s, assignment[s]);
      const int w = cheapest(s);
      add(s, w);
      assignment[s] = w;
      --left[w];
      set_fill(w);
    }
    price.swap(middle);
  }

  // Pairs of samples change places where that lowers the sum.
  void exchange(int64_t* assignment) {
    find_partners(assignment);
    const auto* const cost = reinterpret_cast<const float*>(gains_.data());
    for (int64_t s = 0; s < samples_; ++s) {
      const int64_t from = assignment[s];
      remove(s, from);
      set_costs(s);
      tried_.clear();
      for (int64_t w = 0; w < workers_; ++w) {
        if (w == from) continue;
        auto& list = partners_[w * workers_ + from];
        while (!list.empty() && assignment[list.back().second] != w) list.pop_back();
        const float own = cost[from] - cost[w];
        // Not the first alone: two samples that share rows each want to go where the other is.
        int64_t left = kTries;
        for (auto at = list.rbegin(); at != list.rend() && left && own + at->first > 0; ++at) {
          if (assignment[at->second] == w) tried_.emplace_back(own + at->first, at->second);
          --left;
        }
      }
      const auto tries = std::min<ptrdiff_t>(static_cast<ptrdiff_t>(tried_.size()), kTries);
      std::partial_sort(tried_.begin(), tried_.begin() + tries, tried_.end(), std::greater<>());
      bool exchanged = false;
      for (ptrdiff_t n = 0; n < tries && !exchanged; ++n)
        exchanged = exchange_if_less(s, from, tried_[n].second, assignment);
      if (!exchanged) add(s, from);
    }
  }

  // For each ordered pair of workers, the samples of the first that would gain most, or lose least,
  // on the second; the last gains most.
  void find_partners(const int64_t* assignment) {
    const auto most =
        static_cast<size_t>(std::max(kPartners, kPartners * samples_ / (workers_ * workers_)));
    partners_.resize(workers_ * workers_);
    for (auto& list : partners_) list.clear();
    const auto* const cost = reinterpret_cast<const float*>(gains_.data());
    for (int64_t s = 0; s < samples_; ++s) {
      const int64_t from = assignment[s];
      remove(s, from);
      set_costs(s);
      add(s, from);
      for (int64_t to = 0; to < workers_; ++to) {
        if (to == from) continue;
        auto& list = partners_[from * workers_ + to];
        const Partner given{cost[from] - cost[to], static_cast<int32_t>(s)};
        if (list.size() == most) {
          if (given <= list.front()) continue;
          std::pop_heap(list.begin(), list.end(), std::greater<>());
          list.pop_back();
        }
        list.push_back(given);
        std::push_heap(list.begin(), list.end(), std::greater<>());
      }
    }
    for (auto& list : partners_) std::sort(list.begin(), list.end());
  }

  // The sample is nowhere: the other stays and it comes back, or they change places.
  bool exchange_if_less(int64_t s, int64_t from, int64_t other, int64_t* assignment) {
    const int64_t to = assignment[other];
    const auto* const cost = reinterpret_cast<const float*>(gains_.data());
    remove(other, to);
    set_costs(other);
    const float its_stay = cost[to], its_move = cost[from];
    add(other, to);
    set_costs(s);
    const float stay = its_stay + cost[from];
    remove(other, to);
    add(other, from);
    set_costs(s);
    const float move = its_move + cost[to];
    if (move < stay * (1 - 1e-6f)) {
      add(s, to);
      std::swap(assignment[s], assignment[other]);
      return true;
    }
    remove(other, from);
    add(other, to);
    return false;
  }

  // What a sample that is nowhere adds on each worker: bytes over its link, of which the worker
  // saves what its gain says, and what is to be paid anywhere.
  void set_costs(int64_t s) {
    std::fill(gains_.begin(), gains_.end(), Lanes{});
    anywhere_ = 0;
    float everywhere = 0;
    for (int64_t n = ends_[s]; n < ends_[s + 1]; ++n) everywhere += count_gains(rows_[reads_[n]]);
    const Lanes every = {everywhere, everywhere, everywhere, everywhere};
    const Lanes any = {anywhere_, anywhere_, anywhere_, anywhere_};
    const auto* const seconds = reinterpret_cast<const Lanes*>(seconds_.data());
    for (size_t g = 0; g < gains_.size(); ++g) gains_[g] = (every - gains_[g]) * seconds[g] + any;
  }

  // The worker where a sample that is nowhere adds least, by the workers' prices and room.
  int cheapest(int64_t s) {
    set_costs(s);
    const auto* const fill = reinterpret_cast<const Lanes*>(fill_.data());
    Lanes least = {kFull, kFull, kFull, kFull};
    for (size_t g = 0; g < gains_.size(); ++g) {
      gains_[g] += fill[g];
      least = gains_[g] < least ? gains_[g] : least;
    }
    const float minimum = std::min(std::min(least[0], least[1]), std::min(least[2], least[3]));
    const auto* const cost = reinterpret_cast<const float*>(gains_.data());
    int found = 0;
    while (cost[found] != minimum) ++found;
    return found;
  }

  // Add what each worker saves of a row; returns the bytes that a worker pays which saves none.
  float count_gains(const Row& row) {
    auto* const gain = reinterpret_cast<float*>(gains_.data());
    const float push = row.trainers & ~row.latest ? 0 : row.push;
    for_each(row.latest & ~row.trainers,
             [&](int w) { gain[w] += row.bytes + push * bandwidth_[w]; });
    if (row.count == 0) {
      anywhere_ += push;
      return row.bytes;
    }
    const float twice = 2 * row.bytes;  // a pull, and a push later
    if (row.count == static_cast<uint32_t>(workers_)) return 0;
    if (row.count == 1 || push != 0) {
      // Of a sole trainer the update stays in its cache.
      const float first = row.count == 1 ? row.bytes * seconds_[__builtin_ctzll(row.trainers)] : 0;
      anywhere_ += push + first;
      for_each(row.trainers, [&](int w) { gain[w] += twice + (push + first) * bandwidth_[w]; });
    } else if (row.count < kFew) {
      for_each(row.trainers, [&](int w) { gain[w] += twice; });
    } else {
      const auto& lanes = lanes_of();
      const Lanes value = {twice, twice, twice, twice};
      uint64_t set = row.trainers;
      for (size_t g = 0; g < gains_.size(); ++g, set >>= kLanes)
        gains_[g] += (Lanes)((Bits)value & lanes[set & ((1 << kLanes) - 1)]);
    }
    return twice;
  }

  int64_t samples_;
  int64_t workers_;
  std::vector<float> seconds_, bandwidth_;  // of each worker's link, for a byte
  std::vector<float> fill_;                 // what a worker's price adds, kFull: no room
  std::vector<Lanes> gains_;                // of the sample that is looked at, then its costs
  std::vector<int64_t> ends_;               // of the samples' reads
  std::vector<uint32_t> reads_;             // numbers of `rows_`
  std::vector<Row> rows_;
  std::vector<uint8_t> held_;  // [rows, M] samples of each worker
  float tie_ = 0, rise_ = 0, anywhere_ = 0;
  std::vector<std::vector<Partner>> partners_;  // [M, M]
  std::vector<Partner> tried_;
};

}  // namespace oper
