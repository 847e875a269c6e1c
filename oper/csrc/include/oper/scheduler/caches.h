// Caches: which rows each of M workers caches, within a capacity for each row width.
//
// One record a row holds a bit for each worker, so that a batch looks a row up once for all of
// them. A batch is first looked up (its rows get numbers, and are known until it was trained) and
// later assigned: `begin` says who trains what. Rows that a worker trains in the current batch do
// not leave its cache. A row that nobody caches and no batch reads is forgotten.
//
// Address: width << 56 | anything, such as owner << 40 | slot.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

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

class Caches {
 public:
  static constexpr int kMostWorkers = 64;
  static constexpr int64_t kAhead = 16;  // rows, far enough to hide a miss

  // `capacity` in rows for each width; every worker has as much.
  Caches(int workers, std::vector<int64_t> capacity, Policy policy)
      : workers_(workers),
        capacity_(std::move(capacity)),
        policy_(policy) {
    shelves_.resize(workers * capacity_.size(), Shelf(policy == Policy::kLru));
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

  // Append the distinct rows of each of the next batch's samples, and where in `addresses` each is;
  // `ends` gets where each sample's end in `rows`.
  void look_up(const int64_t* addresses, const int64_t* offsets, int64_t samples,
               std::vector<RowNumber>& rows, std::vector<int64_t>& positions,
               std::vector<int64_t>& ends) {
    ++prepared_;
    const int64_t size = offsets[samples];
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
        if (row.stamp == stamp_) continue;
        row.stamp = stamp_;
        rows.push_back(number);
        positions.push_back(n);
      }
      ends.push_back(static_cast<int64_t>(rows.size()));
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
        if (!row.trainers) batch_.push_back(rows[n]);
        row.trainers |= Workers{1} << assignment[s];
      }
  }

  // Nobody trains the batch after all.
  void abandon() {
    for (const RowNumber row : batch_) rows_[row].trainers = 0;
    batch_.clear();
  }

  // The distinct rows of the batch that was begun, in the order of their first sample.
  const std::vector<RowNumber>& batch() const { return batch_; }

  // What follows reads and writes of a row, ahead of it: first of all workers, then of trainers.
  void prefetch(RowNumber row) const { __builtin_prefetch(&rows_[row]); }
  void prefetch_copies(RowNumber row) const {
    for_each(rows_[row].trainers,
             [&](int w) { __builtin_prefetch(&copies_[static_cast<size_t>(row) * workers_ + w]); });
  }

  // Rows of each width that each worker needs for the batch, [M, widths].
  std::vector<int64_t> needed() const {
    std::vector<int64_t> result(shelves_.size());
    for (const RowNumber row : batch_)
      for_each(rows_[row].trainers, [&](int w) { ++result[w * widths() + width(row)]; });
    return result;
  }

  // The worker's copy is used; it is the latest.
  void use(RowNumber row, int worker) {
    Copy& copy = copy_of(row, worker);
    Shelf& on = shelf(worker, width(row));
    if (policy_ == Policy::kLru) {
      copy.last_use = ++uses_[worker];
      on.order.add(copy.last_use, row);
      return;
    }
    const uint64_t before = copy.priority(policy_);
    copy.last_use = ++uses_[worker];
    if (policy_ == Policy::kLightLfu && copy.frequency >= kFrequent) {
      copy.last_use = 0;  // no upkeep of what is frequent
    } else if (++copy.frequency == kFrequent) {
      ++on.frequent;
      copy.last_use = policy_ == Policy::kLightLfu ? 0 : copy.last_use;
    }
    if (copy.mark != on.target) {
      copy.mark = on.target;
      ++on.marked;
    }
    copy.latest = true;
    if (copy.priority(policy_) < before) on.order.add(copy.priority(policy_), row);
  }

  // The worker caches the row from now on; `evicted(row)` is called for one that leaves for it, and
  // `soon(row)` for one that will leave after some others.
  template <typename F, typename G>
  void insert(RowNumber row, int worker, const F& evicted, const G& soon) {
    Shelf& on = shelf(worker, width(row));
    if (on.held == capacity_[width(row)]) evicted(evict(worker, width(row), soon));
    ++on.held;
    rows_[row].cached |= Workers{1} << worker;
    copy_of(row, worker) = Copy{};
    use(row, worker);
    if (policy_ != Policy::kLru) on.order.add(copy_of(row, worker).priority(policy_), row);
  }

  // The worker's copy is not the latest any more.
  void outdate(RowNumber row, int worker) {
    Copy& copy = copy_of(row, worker);
    if (!copy.latest) return;
    copy.latest = false;
    if (policy_ == Policy::kEmark) shelf(worker, width(row)).order.add(copy.priority(policy_), row);
  }

  // The batch was trained. `forgotten(row)` is called for rows whose numbers are given back.
  template <typename F>
  void end(const F& forgotten) {
    abandon();
    ++trained_;
    for (const RowNumber row : left_) {
      Row& record = rows_[row];
      if (record.cached || record.prepared - trained_ - 1 < prepared_ - trained_ ||
          record.address == kForgotten)
        continue;
      forgotten(row);
      index_.remove(record.address);
      record.address = kForgotten;
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
        rows_.emplace_back();
        copies_.resize(copies_.size() + workers_);
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
  };

  // A worker's rows of one width.
  struct Shelf {
    explicit Shelf(bool ascending) : order(ascending) {}

    LazyOrder order;
    std::vector<LazyOrder::Entry> pinned;
    int64_t held = 0;
    int64_t frequent = 0;  // rows whose frequency has reached kFrequent
    int64_t marked = 0;    // rows whose mark is the target
    uint32_t target = 1;
  };

  Shelf& shelf(int worker, int width) { return shelves_[worker * widths() + width]; }
  Copy& copy_of(RowNumber row, int worker) {
    return copies_[static_cast<size_t>(row) * workers_ + worker];
  }

  // The row that leaves the worker's cache. There is one: the batch fits.
  template <typename G>
  RowNumber evict(int worker, int width, const G& soon) {
    Shelf& on = shelf(worker, width);
    const Workers bit = Workers{1} << worker;
    for (;;) {
      // What leaves next was used long ago, and is in no processor's cache.
      const RowNumber next = on.order.ahead(kAhead);
      __builtin_prefetch(&rows_[next]);
      __builtin_prefetch(&copy_of(next, worker));
      soon(next);
      const LazyOrder::Entry least = on.order.pop();
      Row& row = rows_[least.row];
      if (!(row.cached & bit) || width_of(row.address) != width) continue;
      const Copy& copy = copy_of(least.row, worker);
      const uint64_t now = copy.priority(policy_);
      // A lower one has an entry of its own, and in a queue a higher one has.
      if (least.priority > now || (least.priority < now && policy_ == Policy::kLru)) continue;
      if (least.priority < now) {
        on.order.add(now, least.row);
      } else if (row.trainers & bit) {
        on.pinned.push_back(least);
      } else {
        row.cached &= ~bit;
        --on.held;
        on.frequent -= copy.frequency >= kFrequent;
        on.marked -= copy.mark == on.target;
        if (!row.cached) left_.push_back(least.row);
        return least.row;
      }
    }
  }

  // Between batches: the target of marks, the age of frequencies, and entries that are of no use.
  void keep_in_order(size_t number) {
    const int worker = static_cast<int>(number) / widths();
    const int width = static_cast<int>(number) % widths();
    Shelf& on = shelves_[number];
    // In a queue, pinned rows were used since, and have later entries.
    if (policy_ != Policy::kLru)
      for (const auto& entry : on.pinned) on.order.add(entry.priority, entry.row);
    on.pinned.clear();
    if (on.held == capacity_[width] && on.marked == on.held) {
      ++on.target;
      on.marked = 0;
    }
    const bool age = policy_ == Policy::kLightLfu && 2 * on.frequent > capacity_[width];
    if (!age && on.order.size() <= 2 * static_cast<size_t>(on.held) + 1024) return;
    next_stamp();
    on.order.filter([&](LazyOrder::Entry& entry) {
      Row& row = rows_[entry.row];
      if (!(row.cached >> worker & 1) || width_of(row.address) != width) return false;
      Copy& copy = copy_of(entry.row, worker);
      if (policy_ == Policy::kLru) return entry.priority == copy.last_use;
      if (row.stamp == stamp_) return false;
      row.stamp = stamp_;
      if (age) copy.frequency /= 2;
      entry.priority = copy.priority(policy_);
      return true;
    });
    if (age) on.frequent = 0;
  }

  int workers_;
  std::vector<int64_t> capacity_;
  Policy policy_;
  RowIndex index_;
  std::vector<Row> rows_;
  std::vector<Copy> copies_;    // [rows, M]
  std::vector<Shelf> shelves_;  // [M, widths]
  std::vector<uint64_t> uses_;
  std::vector<RowNumber> batch_, left_;
  uint32_t stamp_ = 0, prepared_ = 0, trained_ = 0;
};

}  // namespace oper
