// RowIndex: the numbers of rows by their 64-bit address. One look-up is one cache line.
//
// Open addressing at a load of at most a half, with linear probing; a removed entry's successors
// move up, so that nothing is left of it. Numbers are small and used again, so that whatever is
// kept of the rows are plain arrays.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

namespace oper {

class RowIndex {
 public:
  using Number = uint32_t;
  static constexpr Number kNone = std::numeric_limits<Number>::max();

  // Bytes for a number in use, right after the index has grown.
  static constexpr int64_t bytes_of_number() { return 4 * sizeof(Slot); }

  RowIndex() : slots_(64) {}

  // One more than the largest number in use.
  Number size() const { return size_; }

  void prefetch(uint64_t address) const { __builtin_prefetch(&slots_[home(address)]); }

  // The number of an address, and whether it got it now.
  std::pair<Number, bool> find_or_add(uint64_t address) {
    for (uint64_t at = home(address);; at = (at + 1) & mask()) {
      Slot& slot = slots_[at];
      if (slot.number == kNone) break;
      if (slot.address == address) return {slot.number, false};
    }
    if (2 * (used_ + 1) > slots_.size()) grow();
    Number number = size_;
    if (free_.empty()) {
      ++size_;
    } else {
      number = free_.back();
      free_.pop_back();
    }
    put({address, number});
    ++used_;
    return {number, true};
  }

  // The number of an address, kNone where it has none.
  Number find(uint64_t address) const {
    for (uint64_t at = home(address);; at = (at + 1) & mask())
      if (slots_[at].number == kNone || slots_[at].address == address) return slots_[at].number;
  }

  // Give the number of an address back. The address has one.
  void remove(uint64_t address) {
    free_.push_back(taken_out(address));
    --used_;
  }

  // The numbers of the addresses `from` [size], which have one each, are those of `to` from now on,
  // which have none but those that are given here.
  void rename(const uint64_t* from, const uint64_t* to, size_t size) {
    std::vector<Slot> renamed;
    renamed.reserve(size);
    for (size_t n = 0; n < size; ++n) renamed.push_back({to[n], taken_out(from[n])});
    for (const Slot& slot : renamed) put(slot);
  }

 private:
  struct Slot {
    uint64_t address = 0;
    Number number = kNone;
  };

  uint64_t mask() const { return slots_.size() - 1; }
  uint64_t home(uint64_t address) const {
    uint64_t mixed = (address ^ address >> 32) * 0x9e3779b97f4a7c15u;
    return (mixed ^ mixed >> 29) & mask();
  }
  // The number of an address, which has none any more.
  Number taken_out(uint64_t address) {
    uint64_t hole = home(address);
    while (slots_[hole].address != address || slots_[hole].number == kNone)
      hole = (hole + 1) & mask();
    const Number number = slots_[hole].number;
    for (uint64_t at = (hole + 1) & mask(); slots_[at].number != kNone; at = (at + 1) & mask()) {
      // An entry may fill the hole if its home is not behind it.
      const uint64_t distance = (at - home(slots_[at].address)) & mask();
      if (distance >= ((at - hole) & mask())) {
        slots_[hole] = slots_[at];
        hole = at;
      }
    }
    slots_[hole] = Slot{};
    return number;
  }
  void put(const Slot& slot) {
    uint64_t at = home(slot.address);
    while (slots_[at].number != kNone) at = (at + 1) & mask();
    slots_[at] = slot;
  }
  void grow() {
    std::vector<Slot> old(2 * slots_.size());
    old.swap(slots_);
    for (const Slot& slot : old)
      if (slot.number != kNone) put(slot);
  }

  std::vector<Slot> slots_;
  std::vector<Number> free_;
  uint64_t used_ = 0;
  Number size_ = 0;
};

}  // namespace oper
