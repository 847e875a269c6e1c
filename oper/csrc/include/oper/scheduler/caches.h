// Caches: which rows each of M workers caches, within a capacity for each row width.
//
// One record a row holds a bit for each worker, so that a batch looks a row up once for all of
// them. A batch is first looked up (its rows get numbers, and are known until it was trained) and
// later assigned: `begin` says who trains what. Rows that a worker trains in the current batch do
// not leave its cache. A row that nobody caches and no batch reads is forgotten.
//
// What the synchronisation keeps of a row, RowState, and of each copy, CopyState, lies beside what
// the caches keep: a batch touches thousands of rows that are in no processor's cache, and each
// costs a line for the row and one for its copies.
//
// Address: width << 56 | anything, such as owner << 40 | slot.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "oper/common/growing_array.h"
#include "oper/scheduler/eviction.h"
#include "oper/scheduler/row_index.h"

namespace oper {

using RowNumber = RowIndex::Number;
using Workers = uint64_t;  // a bit for each

inline int width_of(uint64_t address) { return static_cast<int>(address >> 56); }

// f(worker) for each worker of a set.
template <typename F>
void for_each(Workers set, const F& f) {
  for (; set; set &= set - 1) f(__builtin_ctzll(set));
}

template <typename RowState, typename CopyState>
class Caches {
 public:
  static constexpr int kMostWorkers = 64;
  static constexpr int64_t kAhead = 16;  // rows, far enough to hide a miss

  // `capacity` in rows for each width; every worker has as much.
  Caches(int workers, std::vector<int64_t> capacity, Policy policy)
      : workers_(workers),
        capacity_(std::move(capacity)),
        policy_(policy) {
    shelves_.resize(workers * capacity_.size());
    needed_.resize(shelves_.size());
    uses_.resize(workers);
  }

  int workers() const { return workers_; }
  int widths() const { return static_cast<int>(capacity_.size()); }
  RowNumber rows() const { return static_cast<RowNumber>(rows_.size()); }
  // Whether a number below rows() is that of a row: those of forgotten rows are free.
  bool known(RowNumber row) const { return rows_[row].address != kForgotten; }
  int width(RowNumber row) const { return width_of(rows_[row].address); }
  uint64_t address(RowNumber row) const { return rows_[row].address; }
  Workers cached(RowNumber row) const { return rows_[row].cached; }
  Workers trainers(RowNumber row) const { return rows_[row].trainers; }
  int64_t capacity(int width) const { return capacity_[width]; }

  // What the synchronisation keeps: RowState{} of a row that was not known, and CopyState{} of a
  // copy that came into a cache.
  RowState& state(RowNumber row) { return rows_[row].state; }
  const RowState& state(RowNumber row) const { return rows_[row].state; }
  CopyState& copy(RowNumber row, int worker) { return copy_of(row, worker).state; }
  const CopyState& copy(RowNumber row, int worker) const {
    return copies_[static_cast<size_t>(row) * workers_ + worker].state;
  }

  // The distinct rows of each of the next batch's samples, and where in `addresses` each is, both
  // with room for all of these; `ends` [samples + 1] gets where each sample's begin and end.
  void look_up(const int64_t* addresses, const int64_t* offsets, int64_t samples, RowNumber* rows,
               int64_t* positions, int64_t* ends) {
    ++prepared_;
    const int64_t size = offsets[samples];
    int64_t found = 0;
    ends[0] = 0;
    RowNumber numbers[kAhead];  // of the addresses from n on
    for (int64_t n = 0; n < std::min(size, kAhead); ++n) numbers[n] = number_of(addresses[n]);
    for (int64_t s = 0; s < samples; ++s) {
      next_stamp();
      for (int64_t n = offsets[s]; n < offsets[s + 1]; ++n) {
        const RowNumber number = numbers[n % kAhead];
        if (n + 2 * kAhead < size)
          index_.prefetch(static_cast<uint64_t>(addresses[n + 2 * kAhead]));
        if (n + kAhead < size) {
          numbers[n % kAhead] = number_of(addresses[n + kAhead]);
          prefetch(numbers[n % kAhead]);
        }
        Row& row = rows_[number];
        row.prepared = prepared_;
        rows[found] = number;
        positions[found] = n;
        found += row.stamp != stamp_;
        row.stamp = stamp_;
      }
      ends[s + 1] = found;
    }
  }

  // The number of a row, RowIndex::kNone of one that is not known.
  RowNumber find(uint64_t address) const { return index_.find(address); }

  // The next batch that was looked up is trained so: sample s, rows [offsets[s], offsets[s + 1]),
  // by worker assignment[s]. Workers come one after the other, with their samples in order: so each
  // of them could tell its rows to the others.
  void begin(const int32_t* rows, const int64_t* offsets, int64_t samples,
             const int64_t* assignment) {
    abandon();
    std::vector<int64_t> first(workers_ + 1), by_worker(samples);
    for (int64_t s = 0; s < samples; ++s) ++first[assignment[s] + 1];
    for (int w = 0; w < workers_; ++w) first[w + 1] += first[w];
    for (int64_t s = 0; s < samples; ++s) by_worker[first[assignment[s]]++] = s;
    for (const int64_t s : by_worker)
      for (int64_t n = offsets[s]; n < offsets[s + 1]; ++n) {
        if (n + kAhead < offsets[samples]) prefetch(rows[n + kAhead]);
        Row& row = rows_[rows[n]];
        const Workers bit = Workers{1} << assignment[s];
        if (row.trainers & bit) continue;
        if (!row.trainers) batch_.push_back(rows[n]);
        row.trainers |= bit;
        ++needed_[assignment[s] * widths() + width_of(row.address)];
      }
  }

  // Nobody trains the batch after all.
  void abandon() {
    for (const RowNumber row : batch_) rows_[row].trainers = 0;
    batch_.clear();
    std::fill(needed_.begin(), needed_.end(), 0);
  }

  // The distinct rows of the batch that was begun, in the order of their first sample.
  const std::vector<RowNumber>& batch() const { return batch_; }

  // What follows reads and writes of a row, ahead of it: first of all workers, then of trainers.
  void prefetch(RowNumber row) const { __builtin_prefetch(&rows_[row]); }
  void prefetch_copies(RowNumber row) const {
    for_each(rows_[row].trainers,
             [&](int w) { __builtin_prefetch(&copies_[static_cast<size_t>(row) * workers_ + w]); });
  }

  // Rows of each width that each worker needs for the batch that was begun, [M, widths].
  const std::vector<int64_t>& needed() const { return needed_; }

  // The worker's copy is used; it is the latest.
  void use(RowNumber row, int worker) {
    Shelf& on = shelf(worker, width(row));
    const uint64_t now = ++uses_[worker];
    if (policy_ == Policy::kLru) {
      copy_of(row, worker).last_use = static_cast<uint32_t>(now);
      on.queue.add(static_cast<uint32_t>(now), row);
      return;
    }
    Usage& usage = usage_of(row, worker);
    const uint64_t before = usage.priority(policy_);
    usage.last_use = now;
    if (policy_ == Policy::kLightLfu && usage.frequency >= kFrequent) {
      usage.last_use = 0;  // no upkeep of what is frequent
    } else if (++usage.frequency == kFrequent) {
      ++on.frequent;
      usage.last_use = policy_ == Policy::kLightLfu ? 0 : usage.last_use;
    }
    if (usage.mark != on.target) {
      usage.mark = on.target;
      ++on.marked;
    }
    usage.latest = true;
    if (usage.priority(policy_) < before) on.heap.add(usage.priority(policy_), row);
  }

  // The worker caches the row from now on; `evicted(row)` is called for one that leaves for it.
  template <typename F>
  void insert(RowNumber row, int worker, const F& evicted) {
    Shelf& on = shelf(worker, width(row));
    if (on.held == capacity_[width(row)]) evicted(evict(worker, width(row)));
    ++on.held;
    rows_[row].cached |= Workers{1} << worker;
    copy_of(row, worker) = Copy{};
    if (policy_ != Policy::kLru) usage_of(row, worker) = Usage{};
    use(row, worker);
    if (policy_ != Policy::kLru) on.heap.add(usage_of(row, worker).priority(policy_), row);
  }

  // The worker's copy is not the latest any more.
  void outdate(RowNumber row, int worker) {
    if (policy_ != Policy::kEmark) return;  // nobody else asks
    Usage& usage = usage_of(row, worker);
    if (!usage.latest) return;
    usage.latest = false;
    shelf(worker, width(row)).heap.add(usage.priority(policy_), row);
  }

  // The batch was trained. Rows that nobody needs are forgotten.
  void end() {
    abandon();
    ++trained_;
    for (size_t n = 0; n < left_.size(); ++n) {
      if (n + 2 * kAhead < left_.size()) prefetch(left_[n + 2 * kAhead]);
      if (n + kAhead < left_.size()) index_.prefetch(rows_[left_[n + kAhead]].address);
      Row& row = rows_[left_[n]];
      if (row.cached || row.prepared - trained_ - 1 < prepared_ - trained_ ||
          row.address == kForgotten)
        continue;
      index_.remove(row.address);
      row.address = kForgotten;
    }
    left_.clear();
    for (size_t n = 0; n < shelves_.size(); ++n) keep_in_order(n);
  }

  // f(row) for each row that a worker caches.
  template <typename F>
  void for_each_cached(const F& f) const {
    for (RowNumber row = 0; row < rows(); ++row)
      if (rows_[row].cached) f(row);
  }

 private:
  void next_stamp() {
    if (++stamp_) return;
    for (Row& row : rows_) row.stamp = 0;
    stamp_ = 1;
  }

  // The number of an address, a new one if it has none.
  RowNumber number_of(int64_t given) {
    const auto address = static_cast<uint64_t>(given);
    const auto [number, added] = index_.find_or_add(address);
    if (added) {
      if (number == rows_.size()) {
        rows_.extend(1);
        copies_.extend(workers_);
        if (policy_ != Policy::kLru) usages_.resize(copies_.size());
      }
      rows_[number] = Row{address};
    }
    return number;
  }

  static constexpr uint64_t kForgotten = ~uint64_t{0};
  static constexpr uint32_t kFrequent = 16;

  struct Row {
    uint64_t address = kForgotten;
    Workers cached = 0;
    Workers trainers = 0;   // of the batch that is trained
    uint32_t stamp = 0;     // the last sample that was looked up with it
    uint32_t prepared = 0;  // the last batch that was looked up with it, modulo 2^32
    RowState state = {};
  };

  struct Copy {
    uint32_t last_use = 0;  // uses of the worker so far, modulo 2^32, for LRU
    CopyState state = {};
  };

  // A worker's rows of one width.
  struct Shelf {
    UseQueue queue;  // of LRU
    LazyHeap heap;   // of the others
    std::vector<LazyHeap::Entry> pinned;
    int64_t held = 0;
    int64_t frequent = 0;  // rows whose frequency has reached kFrequent
    int64_t marked = 0;    // rows whose mark is the target
    uint32_t target = 1;
  };

  Shelf& shelf(int worker, int width) { return shelves_[worker * widths() + width]; }
  Copy& copy_of(RowNumber row, int worker) {
    return copies_[static_cast<size_t>(row) * workers_ + worker];
  }

  Usage& usage_of(RowNumber row, int worker) {
    return usages_[static_cast<size_t>(row) * workers_ + worker];
  }

  // The row that leaves the worker's cache. There is one: the batch fits.
  RowNumber evict(int worker, int width) {
    Shelf& on = shelf(worker, width);
    const RowNumber row = policy_ == Policy::kLru ? first_used(on, worker) : least(on, worker);
    rows_[row].cached &= ~(Workers{1} << worker);
    --on.held;
    if (!rows_[row].cached) left_.push_back(row);
    return row;
  }

  RowNumber first_used(Shelf& on, int worker) {
    for (;;) {
      // What leaves next was used long ago, and is in no processor's cache.
      const RowNumber next = on.queue.ahead(kAhead);
      prefetch(next);
      __builtin_prefetch(&copy_of(next, worker));
      const UseQueue::Entry first = on.queue.pop();
      if (holds(first, on, worker) && !(rows_[first.row].trainers >> worker & 1)) return first.row;
    }
  }

  // Whether an entry is that of the row's last use. What a worker trains now has a later one to
  // come, and is not lost where this one is.
  bool holds(const UseQueue::Entry& entry, const Shelf& on, int worker) {
    const Row& row = rows_[entry.row];
    return (row.cached >> worker & 1) && &shelf(worker, width_of(row.address)) == &on &&
           copy_of(entry.row, worker).last_use == entry.use;
  }

  RowNumber least(Shelf& on, int worker) {
    for (;;) {
      const LazyHeap::Entry least = on.heap.pop();
      const Row& row = rows_[least.row];
      if (!(row.cached >> worker & 1) || &shelf(worker, width_of(row.address)) != &on) continue;
      const Usage& usage = usage_of(least.row, worker);
      const uint64_t now = usage.priority(policy_);
      if (least.priority > now) continue;  // a lower one has an entry of its own
      if (least.priority < now) {
        on.heap.add(now, least.row);
      } else if (row.trainers >> worker & 1) {
        on.pinned.push_back(least);
      } else {
        on.frequent -= usage.frequency >= kFrequent;
        on.marked -= usage.mark == on.target;
        return least.row;
      }
    }
  }

  // Between batches: the target of marks, the age of frequencies, and entries that are of no use.
  void keep_in_order(size_t number) {
    const int worker = static_cast<int>(number) / widths();
    Shelf& on = shelves_[number];
    const size_t most = 2 * static_cast<size_t>(on.held) + 1024;
    if (policy_ == Policy::kLru) {
      if (on.queue.size() <= most) return;
      on.queue.filter([&](const auto& entry) { return holds(entry, on, worker); },
                      [&](const auto& entry) {
                        prefetch(entry.row);
                        __builtin_prefetch(&copy_of(entry.row, worker));
                      });
      return;
    }
    const int64_t capacity = capacity_[static_cast<int>(number) % widths()];
    for (const auto& entry : on.pinned) on.heap.add(entry.priority, entry.row);
    on.pinned.clear();
    if (on.held == capacity && on.marked == on.held) {
      ++on.target;
      on.marked = 0;
    }
    const bool age = policy_ == Policy::kLightLfu && 2 * on.frequent > capacity;
    if (!age && on.heap.size() <= most) return;
    next_stamp();
    on.heap.filter([&](LazyHeap::Entry& entry) {
      Row& row = rows_[entry.row];
      if (!(row.cached >> worker & 1) || &shelf(worker, width_of(row.address)) != &on) return false;
      if (row.stamp == stamp_) return false;
      row.stamp = stamp_;
      Usage& usage = usage_of(entry.row, worker);
      if (age) usage.frequency /= 2;
      entry.priority = usage.priority(policy_);
      return true;
    });
    if (age) on.frequent = 0;
  }

  int workers_;
  std::vector<int64_t> capacity_;
  Policy policy_;
  RowIndex index_;
  GrowingArray<Row> rows_;
  GrowingArray<Copy> copies_;    // [rows, M]
  std::vector<Usage> usages_;    // [rows, M], none for LRU
  std::vector<Shelf> shelves_;   // [M, widths]
  std::vector<int64_t> needed_;  // [M, widths]
  std::vector<uint64_t> uses_;
  std::vector<RowNumber> batch_, left_;
  uint32_t stamp_ = 0, prepared_ = 0, trained_ = 0;
};

}  // namespace oper
