// A hash table keyed by two numbers, a row's accesses and the samples with it: open addressing,
// linear probing, grows at half.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

namespace oper {

template <typename Value>
class PairTable {
 public:
  struct Entry {
    uint64_t accesses;
    uint64_t samples_with_row;
    Value value;
  };

  // The value of a key, which is made with Value{} if new.
  Value& at(uint64_t accesses, uint64_t samples_with_row) {
    if (2 * (used_ + 1) > slots_.size()) grow();
    const size_t slot = probe(accesses, samples_with_row);
    if (!taken_[slot]) {
      taken_[slot] = 1;
      slots_[slot] = {accesses, samples_with_row, Value{}};
      ++used_;
    }
    return slots_[slot].value;
  }

  const Value* find(uint64_t accesses, uint64_t samples_with_row) const {
    if (used_ == 0) return nullptr;
    const size_t slot = probe(accesses, samples_with_row);
    return taken_[slot] ? &slots_[slot].value : nullptr;
  }

  std::vector<Entry> entries() const {
    std::vector<Entry> list;
    list.reserve(used_);
    for (size_t slot = 0; slot < slots_.size(); ++slot)
      if (taken_[slot]) list.push_back(slots_[slot]);
    return list;
  }

  size_t size() const { return used_; }

  void clear() {
    if (used_ == 0) return;
    std::fill(taken_.begin(), taken_.end(), 0);
    used_ = 0;
  }

 private:
  size_t probe(uint64_t accesses, uint64_t samples_with_row) const {
    const size_t mask = slots_.size() - 1;
    // Fibonacci hashing; the high bits of the product are the mixed ones.
    const uint64_t hash =
        (accesses * 0x9E3779B97F4A7C15u) ^ (samples_with_row * 0xC2B2AE3D27D4EB4Fu);
    size_t slot = (hash ^ (hash >> 32)) & mask;
    while (taken_[slot] &&
           (slots_[slot].accesses != accesses || slots_[slot].samples_with_row != samples_with_row))
      slot = (slot + 1) & mask;
    return slot;
  }

  void grow() {
    std::vector<Entry> old = entries();
    const size_t size = slots_.empty() ? 16 : 2 * slots_.size();
    slots_.assign(size, Entry{});
    taken_.assign(size, 0);
    for (const Entry& entry : old) {
      const size_t slot = probe(entry.accesses, entry.samples_with_row);
      taken_[slot] = 1;
      slots_[slot] = entry;
    }
  }

  std::vector<Entry> slots_;
  std::vector<uint8_t> taken_;
  size_t used_ = 0;
};

}  // namespace oper
