// Eviction: which row leaves a worker's cache for another, in the order of eviction_order.h.
//
// A worker has a shelf for each row width, within its capacity. Rows that it trains in the current
// batch do not leave.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "oper/scheduler/eviction_order.h"
#include "oper/scheduler/row_records.h"

namespace oper {

template <typename RowState, typename CopyState>
class Shelves : public RowRecords<RowState, CopyState> {
  using Records = RowRecords<RowState, CopyState>;

 public:
  using Records::kAhead;

  // Bytes of each worker's copy of a row, whether there is one or not, by how rows leave.
  static constexpr int64_t bytes_of_copy(Policy policy) {
    return Records::bytes_of_copy() + (policy == Policy::kLru ? 0 : sizeof(Usage));
  }
  // Bytes for a row that a worker caches, of the order in which they leave.
  static constexpr int64_t bytes_of_order(Policy policy) {
    return 2 * (policy == Policy::kLru ? sizeof(UseQueue::Entry) : sizeof(LazyHeap::Entry));
  }

  int widths() const { return static_cast<int>(capacity_.size()); }
  int64_t capacity(int width) const { return capacity_[width]; }

  // The distinct rows of each of the next batch's samples, and where in `addresses` each is, both
  // with room for all of these; `ends` [samples + 1] gets where each sample's begin and end.
  void look_up(const int64_t* addresses, const int64_t* offsets, int64_t samples, RowNumber* rows,
               int64_t* positions, int64_t* ends) {
    this->number_rows(addresses, offsets, samples, rows, positions, ends);
    if (policy_ != Policy::kLru) usages_.resize(this->copies());
  }

  // The worker's copy is used; it is the latest.
  void use(RowNumber row, int worker) {
    Shelf& on = shelf(worker, this->width(row));
    const uint64_t now = ++uses_[worker];
    if (policy_ == Policy::kLru) {
      this->copy_of(row, worker).last_use = static_cast<uint32_t>(now);
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
    Shelf& on = shelf(worker, this->width(row));
    if (on.held == capacity_[this->width(row)]) evicted(evict(worker, this->width(row)));
    ++on.held;
    this->record(row).cached |= Workers{1} << worker;
    this->copy_of(row, worker) = {};
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
    shelf(worker, this->width(row)).heap.add(usage.priority(policy_), row);
  }

 protected:
  // `capacity` in rows for each width; every worker has as much.
  Shelves(int workers, std::vector<int64_t> capacity, Policy policy)
      : Records(workers),
        capacity_(std::move(capacity)),
        policy_(policy) {
    shelves_.resize(workers * capacity_.size());
    uses_.resize(workers);
  }

  void keep_in_order() {
    for (size_t n = 0; n < shelves_.size(); ++n) keep_in_order(n);
  }

 private:
  static constexpr uint32_t kFrequent = 16;

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

  Usage& usage_of(RowNumber row, int worker) {
    return usages_[static_cast<size_t>(row) * this->workers() + worker];
  }

  // The row that leaves the worker's cache. There is one: the batch fits.
  RowNumber evict(int worker, int width) {
    Shelf& on = shelf(worker, width);
    const RowNumber row = policy_ == Policy::kLru ? first_used(on, worker) : least(on, worker);
    this->record(row).cached &= ~(Workers{1} << worker);
    --on.held;
    if (!this->record(row).cached) this->left(row);
    return row;
  }

  RowNumber first_used(Shelf& on, int worker) {
    for (;;) {
      // What leaves next was used long ago, and is in no processor's cache.
      const RowNumber next = on.queue.ahead(kAhead);
      this->prefetch(next);
      this->prefetch_copy(next, worker);
      const UseQueue::Entry first = on.queue.pop();
      if (holds(first, on, worker) && !(this->record(first.row).trainers >> worker & 1))
        return first.row;
    }
  }

  // Whether an entry is that of the row's last use. What a worker trains now has a later one to
  // come, and is not lost where this one is.
  bool holds(const UseQueue::Entry& entry, const Shelf& on, int worker) {
    const auto& row = this->record(entry.row);
    return (row.cached >> worker & 1) && &shelf(worker, width_of(row.address)) == &on &&
           this->copy_of(entry.row, worker).last_use == entry.use;
  }

  RowNumber least(Shelf& on, int worker) {
    for (;;) {
      const LazyHeap::Entry least = on.heap.pop();
      const auto& row = this->record(least.row);
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
                        this->prefetch(entry.row);
                        this->prefetch_copy(entry.row, worker);
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
    const uint32_t stamp = this->new_stamp();
    on.heap.filter([&](LazyHeap::Entry& entry) {
      auto& row = this->record(entry.row);
      if (!(row.cached >> worker & 1) || &shelf(worker, width_of(row.address)) != &on) return false;
      if (row.stamp == stamp) return false;
      row.stamp = stamp;
      Usage& usage = usage_of(entry.row, worker);
      if (age) usage.frequency /= 2;
      entry.priority = usage.priority(policy_);
      return true;
    });
    if (age) on.frequent = 0;
  }

  std::vector<int64_t> capacity_;
  Policy policy_;
  std::vector<Usage> usages_;   // [rows, M], none for LRU
  std::vector<Shelf> shelves_;  // [M, widths]
  std::vector<uint64_t> uses_;
};

}  // namespace oper
