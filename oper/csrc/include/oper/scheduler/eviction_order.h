// Eviction: in which order the rows of one cache leave it.
//
// Every copy of a row has a priority, and the one with the least leaves first:
//
//     LRU        when it was last used
//     LFU        how often it was used, then when last
//     light LFU  the same, but a row used often enough counts no further, and when half of the
//                cache is such rows, all counts halve (HET; its own never age, and freeze)
//     Emark      rows that are not the latest, then by mark, then by how often used (ESD §8.1)
//
// Priorities are kept in an order that is put right only where it is looked at: an entry is as the
// priority was when it was made. In a heap, one that is higher by now goes back when it comes up,
// and for a lower one an entry was added at once, so that a use costs no more than writing the
// priority down. LRU has a queue with an entry for each use, of which the last one holds.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

namespace oper {

enum class Policy : int64_t { kLru, kLfu, kLightLfu, kEmark };

// How a worker's copy of a row was used, as the policies that have a heap see it.
struct Usage {
  uint64_t last_use = 0;   // uses of the worker so far
  uint32_t frequency = 0;  // uses since it was cached
  uint32_t mark = 0;
  bool latest = true;

  uint64_t priority(Policy policy) const {
    constexpr uint64_t kUses = (uint64_t{1} << 40) - 1;
    constexpr uint32_t kMostUses = (1 << 24) - 1;
    switch (policy) {
      case Policy::kLru: break;  // has a queue
      case Policy::kLfu:
      case Policy::kLightLfu:
        return uint64_t{std::min(frequency, kMostUses)} << 40 | (last_use & kUses);
      case Policy::kEmark:
        // 1 bit, 19 bits, 12 bits; the use, modulo 2^32, only tells equal rows apart.
        return uint64_t{latest} << 63 | uint64_t{std::min(mark, (1u << 19) - 1)} << 44 |
               uint64_t{std::min(frequency, (1u << 12) - 1)} << 32 | (last_use & 0xffffffff);
    }
    return 0;
  }
};

// Rows with the priorities that they had when they were added, the least first.
class LazyHeap {
 public:
  struct Entry {
    uint64_t priority;
    uint32_t row;
    bool operator>(const Entry& other) const { return priority > other.priority; }
  };

  size_t size() const { return entries_.size(); }
  uint32_t least() const { return entries_.front().row; }

  void add(uint64_t priority, uint32_t row) {
    entries_.push_back({priority, row});
    std::push_heap(entries_.begin(), entries_.end(), std::greater<>());
  }
  Entry pop() {
    std::pop_heap(entries_.begin(), entries_.end(), std::greater<>());
    const Entry least = entries_.back();
    entries_.pop_back();
    return least;
  }
  // Keep the entries for which keep(entry) is true, which may change their priorities.
  template <typename F>
  void filter(const F& keep) {
    size_t kept = 0;
    for (size_t n = 0; n < entries_.size(); ++n)
      if (keep(entries_[n])) entries_[kept++] = entries_[n];
    entries_.resize(kept);
    std::make_heap(entries_.begin(), entries_.end(), std::greater<>());
  }

 private:
  std::vector<Entry> entries_;
};

// The uses of rows, the first ones first.
class UseQueue {
 public:
  struct Entry {
    uint32_t use;  // modulo 2^32
    uint32_t row;
  };

  size_t size() const { return entries_.size() - first_; }

  // The row of the entry that comes up so many entries from now, or of the next one.
  uint32_t ahead(size_t entries) const {
    const size_t at = first_ + entries;
    return entries_[at < entries_.size() ? at : first_].row;
  }

  void add(uint32_t use, uint32_t row) {
    if (entries_.size() == entries_.capacity() && 2 * first_ > entries_.size()) {
      entries_.erase(entries_.begin(), entries_.begin() + static_cast<std::ptrdiff_t>(first_));
      first_ = 0;
    }
    entries_.push_back({use, row});
  }
  Entry pop() { return entries_[first_++]; }

  // Keep the entries for which keep(entry) is true; soon(entry) is called for each before.
  template <typename F, typename G>
  void filter(const F& keep, const G& soon) {
    constexpr size_t kAhead = 16;
    size_t kept = 0;
    for (size_t n = first_; n < entries_.size(); ++n) {
      if (n + kAhead < entries_.size()) soon(entries_[n + kAhead]);
      const Entry entry = entries_[n];
      if (keep(entry)) entries_[kept++] = entry;
    }
    entries_.resize(kept);
    first_ = 0;
  }

 private:
  size_t first_ = 0;
  std::vector<Entry> entries_;
};

}  // namespace oper
