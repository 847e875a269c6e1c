// Bulk-synchronous caches: the exact state model (Herald, App. A), for full and on-demand pushes.
//
// A worker's copy of a row is the latest, or partial (it has been trained by several workers, and
// holds its own update of them), or neither. Of a row that was trained by several, no copy is the
// latest until all of them have pushed. An iteration:
//
//     push   on demand: rows that someone trains now and that are partial; rows that are the latest
//            in one cache, that the tier lacks and that another worker trains now. With peers, the
//            latter go straight to that worker if there is one alone, and the tier gets no copy
//     pull   what a worker trains and has not got the latest copy of; what must leave for it is
//            pushed if the tier lacks it
//     train  a sole trainer has the latest copy, several have partial ones
//     push   in full: every update
//
// Beside the states, which decide what moves, go the counts of updates that each copy and the tier
// really contain, moved by pulls and pushes alone: a read whose count is not that of all earlier
// iterations is wrong, whatever the states say.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "oper/scheduler/caches.h"
#include "oper/scheduler/grouping.h"
#include "oper/scheduler/transmissions.h"

namespace oper {

enum class Pushes : int64_t { kFull, kOnDemand, kPeer };

class BulkSynchronous {
  struct State {
    Workers latest = 0;
    Workers partial = 0;
    uint32_t updates = 0;       // by everyone so far
    uint32_t tier_updates = 0;  // of them, those that the tier contains
    bool tier_latest = true;
  };
  struct Contained {
    uint32_t updates = 0;  // that a copy contains
  };

 public:
  using Caches = oper::Caches<State, Contained>;

  BulkSynchronous(Caches caches, std::vector<RowBytes> bytes, Pushes pushes)
      : caches_(std::move(caches)),
        bytes_(std::move(bytes)),
        pushes_(pushes) {}

  Caches& caches() { return caches_; }
  const Caches& caches() const { return caches_; }

  Moves& moves() { return moves_; }

  // The next batch that was looked up is trained so (caches.h).
  void begin(const int32_t* rows, const int64_t* offsets, int64_t samples,
             const int64_t* assignment) {
    caches_.begin(rows, offsets, samples, assignment);
  }

  // What comes before the batch that the caches have begun is trained: what is pushed, evicted and
  // pulled. `moved` [M] is added to.
  void read(Transmissions* moved) {
    const auto& batch = caches_.batch();
    const size_t size = batch.size();
    if (pushes_ != Pushes::kFull)
      for (size_t n = 0; n < size; ++n) {
        if (n + Caches::kAhead < size) caches_.prefetch(batch[n + Caches::kAhead]);
        push_needed(batch[n], moved);
      }
    for (size_t n = 0; n < size; ++n) {
      if (n + 2 * Caches::kAhead < size) caches_.prefetch(batch[n + 2 * Caches::kAhead]);
      if (n + Caches::kAhead < size) caches_.prefetch_copies(batch[n + Caches::kAhead]);
      pull(batch[n], moved);
    }
  }

  // The batch was trained.
  void update(Transmissions* moved) {
    const auto& batch = caches_.batch();
    for (size_t n = 0; n < batch.size(); ++n) {
      if (n + 2 * Caches::kAhead < batch.size()) caches_.prefetch(batch[n + 2 * Caches::kAhead]);
      if (n + Caches::kAhead < batch.size()) caches_.prefetch_copies(batch[n + Caches::kAhead]);
      update(batch[n]);
      if (pushes_ == Pushes::kFull) push_all(batch[n], moved);
    }
    end();
  }

  // The batch is over, and was only read if it was not trained before.
  void end() { caches_.end(); }

  // The tier gets what it lacks of a row, and trains it by itself: no copy is the latest.
  void settle(RowNumber row, Transmissions* moved) {
    push_all(row, moved);
    State& state = caches_.state(row);
    for_each(state.latest, [&](int w) { caches_.outdate(row, w); });
    state.latest = 0;
    state.tier_updates = ++state.updates;
  }

  // Push whatever the tier lacks, for a checkpoint or an evaluation.
  void flush(Transmissions* moved) {
    caches_.for_each_cached([&](RowNumber row) { flush(row, moved); });
  }

  // Push what it lacks of a row.
  void flush(RowNumber row, Transmissions* moved) { push_all(row, moved); }

  // How many rows of each sample are the latest in each worker's cache, [samples, M].
  void latest_rows(const int32_t* rows, const int64_t* offsets, int64_t samples,
                   double* scores) const {
    const int workers = caches_.workers();
    for (int64_t s = 0; s < samples; ++s) {
      double* const score = scores + s * workers;
      std::fill_n(score, workers, 0.0);
      for (int64_t n = offsets[s]; n < offsets[s + 1]; ++n)
        for_each(caches_.state(rows[n]).latest, [&](int w) { score[w] += 1; });
    }
  }

  // What the transmissions of each sample would cost on each worker, [samples, M], at
  // `seconds_per_byte` [M] (ESD): pulls of rows that are not the latest there, and the push of a
  // row that the tier lacks by the worker that has it. Partial rows are pushed whoever trains them.
  void expected_costs(const int32_t* rows, const int64_t* offsets, int64_t samples,
                      const double* seconds_per_byte, double* costs) const {
    const int workers = caches_.workers();
    for (int64_t s = 0; s < samples; ++s) {
      double* const cost = costs + s * workers;
      double pulls = 0, pushes = 0;  // if nothing were the latest there
      std::fill_n(cost, workers, 0.0);
      for (int64_t n = offsets[s]; n < offsets[s + 1]; ++n) {
        if (n + Caches::kAhead < offsets[samples]) caches_.prefetch(rows[n + Caches::kAhead]);
        const State& state = caches_.state(rows[n]);
        const auto bytes = static_cast<double>(bytes_[caches_.width(rows[n])].row);
        pulls += bytes;
        if (!state.latest) continue;
        // Of what the tier lacks one worker alone has the latest copy.
        const int owner = __builtin_ctzll(state.latest);
        const double push = state.tier_latest ? 0 : bytes * seconds_per_byte[owner];
        pushes += push;
        for_each(state.latest, [&](int w) { cost[w] -= bytes * seconds_per_byte[w] + push; });
      }
      for (int w = 0; w < workers; ++w) cost[w] += pulls * seconds_per_byte[w] + pushes;
    }
  }

  // What the row costs in a batch, for grouping.
  RowCost row_cost(RowNumber row, const double* seconds_per_byte) const {
    const State& state = caches_.state(row);
    const auto bytes = static_cast<double>(bytes_[caches_.width(row)].row);
    const bool owned = state.latest && !state.tier_latest;
    const double push = owned ? bytes * seconds_per_byte[__builtin_ctzll(state.latest)] : 0;
    return {state.latest, static_cast<float>(bytes), static_cast<float>(push)};
  }

 private:
  uint32_t& updates_of(RowNumber row, int worker) { return caches_.copy(row, worker).updates; }

  // The worker's update reaches the tier. A partial copy's is its gradient, and the latest copy's
  // the row itself.
  int64_t push(RowNumber row, int worker) {
    State& state = caches_.state(row);
    const RowBytes& bytes = bytes_[caches_.width(row)];
    const Workers bit = Workers{1} << worker;
    const bool partial = state.partial & bit;
    const MoveKind kind = partial ? MoveKind::kPushGradient : MoveKind::kPushRow;
    moves_.add(kind, worker, row, caches_.address(row));
    if (partial) {
      state.partial &= ~bit;
      ++state.tier_updates;
      state.tier_latest = state.partial == 0;
      return bytes.gradient;
    }
    state.tier_updates = updates_of(row, worker);
    state.tier_latest = true;
    return bytes.row;
  }

  void push_needed(RowNumber row, Transmissions* moved) {
    State& state = caches_.state(row);
    if (state.tier_latest) return;
    const Workers trainers = caches_.trainers(row);
    if (state.partial) {
      push_all(row, moved);
    } else if ((trainers & ~state.latest) && !from_peer(trainers)) {
      push_all(row, moved);
    }
  }

  // Whether the only trainer of a row gets it from the worker that has the latest copy. Several
  // trainers need the tier's, to which their gradients will be added.
  bool from_peer(Workers trainers) const {
    return pushes_ == Pushes::kPeer && (trainers & (trainers - 1)) == 0;
  }

  // Every update of the row that the tier lacks.
  void push_all(RowNumber row, Transmissions* moved) {
    State& state = caches_.state(row);
    if (state.tier_latest) return;
    for_each(state.partial ? state.partial : state.latest, [&](int w) {
      moved[w].push_bytes += push(row, w);
      ++moved[w].update_push;
    });
  }

  void pull(RowNumber row, Transmissions* moved) {
    for_each(caches_.trainers(row), [&](int w) {
      State& state = caches_.state(row);
      const Workers bit = Workers{1} << w;
      Transmissions& mine = moved[w];
      ++mine.reads;
      if (state.latest & bit) {
        ++mine.hits;
        caches_.use(row, w);
      } else {
        const int64_t bytes = bytes_[caches_.width(row)].row;
        if (caches_.cached(row) & bit)
          caches_.use(row, w);
        else
          insert(row, w, mine);
        if (state.tier_latest) {
          ++mine.miss_pull;
          mine.pull_bytes += bytes;
          updates_of(row, w) = state.tier_updates;
          moves_.add(MoveKind::kPull, w, row, caches_.address(row));
        } else {
          const int peer = __builtin_ctzll(state.latest);
          ++moved[peer].peer_push;
          moved[peer].push_bytes += bytes;
          updates_of(row, w) = updates_of(row, peer);
          moves_.add(MoveKind::kPeer, w, row, caches_.address(row), peer);
        }
      }
      const int64_t lag = int64_t{state.updates} - int64_t{updates_of(row, w)};
      mine.wrong_reads += lag != 0;
      mine.lag = std::max(mine.lag, lag);
    });
  }

  void insert(RowNumber row, int worker, Transmissions& mine) {
    int64_t victim = -1;
    caches_.insert(row, worker, [&](RowNumber leaving) {
      victim = leaving;
      evict(leaving, worker, mine);
    });
    moves_.add(MoveKind::kInsert, worker, row, caches_.address(row), victim);
  }

  void evict(RowNumber row, int worker, Transmissions& mine) {
    State& state = caches_.state(row);
    const Workers bit = Workers{1} << worker;
    if (!state.tier_latest && ((state.latest | state.partial) & bit)) {
      mine.push_bytes += push(row, worker);
      ++mine.evict_push;
    }
    state.latest &= ~bit;
  }

  void update(RowNumber row) {
    State& state = caches_.state(row);
    const Workers trainers = caches_.trainers(row);
    const bool sole = (trainers & (trainers - 1)) == 0;
    const Workers latest = sole ? trainers : 0;
    for_each(state.latest & ~latest, [&](int w) { caches_.outdate(row, w); });
    if (!sole) {
      for_each(trainers, [&](int w) { caches_.outdate(row, w); });
      moves_.add(MoveKind::kJoint, 0, row, caches_.address(row), __builtin_popcountll(trainers));
    }
    for_each(trainers, [&](int w) {
      ++updates_of(row, w);
      ++state.updates;
    });
    state.latest = latest;
    state.partial = sole ? 0 : trainers;
    state.tier_latest = false;
  }

  Caches caches_;
  std::vector<RowBytes> bytes_;  // of each width
  Pushes pushes_;
  Moves moves_;
};

}  // namespace oper
