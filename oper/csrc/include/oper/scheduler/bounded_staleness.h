// Caches of bounded staleness (HET, §3): clocks of rows, and s, how far they may be apart.
//
// A copy has the clock it was fetched at and its own, which counts its updates; the tier has one.
// A read of a copy is valid while its clock is at most s past the fetched one and the tier's at
// most s past its own; else the copy's pending updates are pushed and the row is fetched again.
//
// As HET prints it, the tier's clock becomes the larger of its own and the pushed one, and a copy
// is tested when it is read: neither bounds the updates that a read lacks. Exact, the tier counts
// the updates that were pushed, and a copy that is more than s past its last push pushes before the
// next reads: then a read lacks at most (M + 1) s updates, and with s = 0 none.
//
// With a `batch_weight`, s falls with a row's frequency: on the clocks an update counts the share
// of the batch's samples that read the row, times `batch_weight`, rounded down, and at least 1.
// Copies of a row that the share f of all samples reads are then min(s, s / (batch_weight f))
// updates apart. A step moves a row by the mean of the batch's gradients, so that this bounds how
// far copies can have moved; the batch itself says the share, to everyone who replays the caches.
//
// Pushed is a sum of gradients, which only plain SGD applies as if each had come in its turn.
//
// Workers look at the clocks one after the other, and what they then ask for is carried out
// together: the pushes of all of them reach the tier before anything is pulled. Beside the clocks,
// which decide what moves, go the counts of updates that each copy and the tier really contain.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "oper/scheduler/caches.h"
#include "oper/scheduler/grouping.h"
#include "oper/scheduler/transmissions.h"

namespace oper {

class BoundedStaleness {
  struct Clock {
    int64_t start = 0;  // when it was fetched; exact, or last pushed
    int64_t now = 0;
    uint32_t pending = 0;  // updates that the tier has not got
    uint32_t updates = 0;  // updates that the copy contains
    bool pulled = false;   // for the batch that is read
  };
  struct Tier {
    int64_t clock = 0;
    uint32_t updates = 0;          // that the tier contains
    uint32_t earlier_updates = 0;  // by everyone
    uint32_t samples = 0;          // of the batch, that read the row
  };

 public:
  using Caches = oper::Caches<Tier, Clock>;

  // `batch_weight`: what an update counts of a row that all samples read; 0: all updates count 1.
  BoundedStaleness(Caches caches, std::vector<RowBytes> bytes, int64_t staleness, bool exact,
                   int64_t batch_weight)
      : caches_(std::move(caches)),
        bytes_(std::move(bytes)),
        s_(staleness),
        exact_(exact),
        batch_weight_(batch_weight) {}

  Caches& caches() { return caches_; }
  const Caches& caches() const { return caches_; }

  Moves& moves() { return moves_; }

  // The next batch that was looked up is trained so (caches.h).
  void begin(const int32_t* rows, const int64_t* offsets, int64_t samples,
             const int64_t* assignment) {
    caches_.begin(rows, offsets, samples, assignment);
    if (!batch_weight_) return;
    samples_ = samples;
    for (const RowNumber row : caches_.batch()) caches_.state(row).samples = 0;
    for (int64_t n = 0; n < offsets[samples]; ++n) ++caches_.state(rows[n]).samples;
  }

  // Before the batch that the caches have begun is trained: workers read one after the other.
  void read(Transmissions* moved) {
    const auto& batch = caches_.batch();
    for (int w = 0; w < caches_.workers(); ++w)
      for (const RowNumber row : batch)
        if (caches_.trainers(row) >> w & 1) read(row, w, moved[w]);
    for (const RowNumber row : batch)
      for_each(caches_.trainers(row), [&](int w) { count_lag(row, w, moved[w]); });
  }

  // The batch was trained.
  void update(Transmissions* moved) {
    for (const RowNumber row : caches_.batch())
      for_each(caches_.trainers(row), [&](int w) { write(row, w, moved[w]); });
    end();
  }

  // The batch is over, and was only read if it was not trained before.
  void end() { caches_.end(); }

  // The tier gets what it lacks of a row, and trains it by itself: no copy is valid.
  void settle(RowNumber row, Transmissions* moved) {
    for_each(caches_.cached(row), [&](int w) {
      if (push(row, w, moved[w])) ++moved[w].update_push;
      Clock& clock = clock_of(row, w);
      clock.start = clock.now - s_ - 1;
    });
    ++caches_.state(row).clock;
    caches_.state(row).updates = ++caches_.state(row).earlier_updates;
  }

  void flush(Transmissions* moved) {
    caches_.for_each_cached([&](RowNumber row) { flush(row, moved); });
  }
  void flush(RowNumber row, Transmissions* moved) {
    for_each(caches_.cached(row), [&](int w) {
      if (push(row, w, moved[w])) ++moved[w].update_push;
    });
  }

  // How many rows of each sample could be read in each worker's cache, [samples, M].
  void latest_rows(const int32_t* rows, const int64_t* offsets, int64_t samples,
                   double* scores) const {
    const int workers = caches_.workers();
    std::fill_n(scores, samples * workers, 0.0);
    for (int64_t s = 0; s < samples; ++s)
      for (int64_t n = offsets[s]; n < offsets[s + 1]; ++n)
        for_each(caches_.cached(rows[n]),
                 [&](int w) { scores[s * workers + w] += valid(rows[n], w); });
  }

  // What the transmissions of each sample would cost on each worker, [samples, M], at
  // `seconds_per_byte` [M], by what the clocks say: fetches, and the updates that a copy
  // which is read again must push before.
  void expected_costs(const int32_t* rows, const int64_t* offsets, int64_t samples,
                      const double* seconds_per_byte, double* costs) const {
    const int workers = caches_.workers();
    std::fill_n(costs, samples * workers, 0.0);
    for (int64_t s = 0; s < samples; ++s)
      for (int64_t n = offsets[s]; n < offsets[s + 1]; ++n)
        for (int w = 0; w < workers; ++w) {
          const bool cached = caches_.cached(rows[n]) >> w & 1;
          if (cached && valid(rows[n], w)) continue;
          const RowBytes& bytes = bytes_[caches_.width(rows[n])];
          const int64_t pushed = cached && clock_of(rows[n], w).pending ? bytes.gradient : 0;
          costs[s * workers + w] += static_cast<double>(bytes.row + pushed) * seconds_per_byte[w];
        }
  }

  // What the row costs in a batch, for grouping: fetches, and pushes that are due.
  RowCost row_cost(RowNumber row, const double* seconds_per_byte) const {
    (void)seconds_per_byte;  // nobody pushes for another's read
    Workers readable = 0;
    for_each(caches_.cached(row), [&](int w) {
      if (valid(row, w)) readable |= Workers{1} << w;
    });
    return {readable, static_cast<float>(bytes_[caches_.width(row)].row), 0};
  }

 private:
  Clock& clock_of(RowNumber row, int w) { return caches_.copy(row, w); }
  const Clock& clock_of(RowNumber row, int w) const { return caches_.copy(row, w); }

  bool valid(RowNumber row, int w) const {
    const Clock& clock = clock_of(row, w);
    return clock.now <= clock.start + s_ && caches_.state(row).clock <= clock.now + s_;
  }

  // Whether there was something to push.
  bool push(RowNumber row, int w, Transmissions& mine) {
    Clock& clock = clock_of(row, w);
    Tier& tier = caches_.state(row);
    if (clock.pending == 0) return false;
    if (exact_) {
      tier.clock += clock.now - clock.start;
      clock.start = clock.now;
    } else {
      tier.clock = std::max(tier.clock, clock.now);
    }
    tier.updates += clock.pending;
    clock.pending = 0;
    moves_.add(MoveKind::kPushGradient, w, row, caches_.address(row));
    mine.push_bytes += bytes_[caches_.width(row)].gradient;
    return true;
  }

  void read(RowNumber row, int w, Transmissions& mine) {
    const bool cached = caches_.cached(row) >> w & 1;
    ++mine.reads;
    if (cached && valid(row, w)) {
      ++mine.hits;
      caches_.use(row, w);
    } else {
      if (cached) {
        mine.update_push += push(row, w, mine);
        caches_.use(row, w);
      } else {
        int64_t victim = -1;
        caches_.insert(row, w, [&](RowNumber leaving) {
          victim = leaving;
          mine.evict_push += push(leaving, w, mine);
        });
        moves_.add(MoveKind::kInsert, w, row, caches_.address(row), victim);
      }
      moves_.add(MoveKind::kPull, w, row, caches_.address(row));
      ++mine.miss_pull;
      mine.pull_bytes += bytes_[caches_.width(row)].row;
      const int64_t now = caches_.state(row).clock;
      clock_of(row, w) = {now, now, 0, 0, true};
    }
  }

  // Once everything that is pushed for the batch has reached the tier.
  void count_lag(RowNumber row, int w, Transmissions& mine) {
    Clock& clock = clock_of(row, w);
    const Tier& tier = caches_.state(row);
    if (clock.pulled) clock.updates = tier.updates;
    clock.pulled = false;
    const int64_t lag = int64_t{tier.earlier_updates} - int64_t{clock.updates};
    mine.wrong_reads += lag != 0;
    mine.lag = std::max(mine.lag, lag);
  }

  void write(RowNumber row, int w, Transmissions& mine) {
    Clock& clock = clock_of(row, w);
    clock.now += weight(row);
    ++clock.pending;
    ++clock.updates;
    ++caches_.state(row).earlier_updates;
    if (exact_ && clock.now > clock.start + s_) mine.update_push += push(row, w, mine);
  }

  // What an update of the row counts in the batch that is trained.
  int64_t weight(RowNumber row) const {
    if (!batch_weight_) return 1;
    return std::max<int64_t>(1, batch_weight_ * caches_.state(row).samples / samples_);
  }

  Caches caches_;
  std::vector<RowBytes> bytes_;  // of each width
  int64_t s_;
  bool exact_;
  int64_t batch_weight_;
  int64_t samples_ = 0;  // of the batch
  Moves moves_;
};

}  // namespace oper
