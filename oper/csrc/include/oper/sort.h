// The accesses of a batch, sorted by the row they read, so that every row's accesses are one run.
//
// Rows are ordered by (bucket, owner code, slot). All (bucket, owner code) pairs together number
// the rows they may name without gaps, as far as the largest slot of the batch, so that a key has
// no more bits than it needs. Key and position share one word where they fit, and a stable radix
// sort from the lowest digit up moves whole words.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#include "oper/address.h"

namespace oper {

// Accesses of one feature: addresses [begin, end), elements of the sort from `element` on.
struct SortedSegment {
  int64_t begin, end;
  int64_t element;
  int64_t bucket;
};

// The owner code of an access: 0 for a replica, else 1 + the rank that owns the row.
struct OwnerCode {
  int64_t rank;

  static bool valid(int64_t address, int64_t ranks) {
    const uint64_t field = static_cast<uint64_t>(address) >> kSlotBits;
    return (field < static_cast<uint64_t>(ranks)) | (field == kLocal) | (field == kReplica);
  }

  int64_t operator()(int64_t address) const {
    const int64_t field = field_of(address);
    return field == kReplica ? 0 : (field == kLocal ? rank : field) + 1;
  }
};

// Key and position in one word.
struct NarrowAccess {
  uint64_t word;

  static NarrowAccess of(uint64_t key, int64_t position, int position_bits) {
    return {key << position_bits | static_cast<uint64_t>(position)};
  }
  uint64_t key(int position_bits) const { return word >> position_bits; }
  int32_t position(int position_bits) const {
    return static_cast<int32_t>(word & ((uint64_t{1} << position_bits) - 1));
  }
};

// For more rows and accesses than 64 bits can tell apart.
struct WideAccess {
  uint64_t word;
  int64_t at;

  static WideAccess of(uint64_t key, int64_t position, int) { return {key, position}; }
  uint64_t key(int) const { return word; }
  int32_t position(int) const { return static_cast<int32_t>(at); }
};

// How a key is cut into digits.
struct Digits {
  // Digits of 12 bits: twice as many places to write to than caches like, and a pass less.
  static constexpr int kMostBits = 12;

  int passes;
  int bits;

  static Digits of(int key_bits) {
    const int passes = (key_bits + kMostBits - 1) / kMostBits;
    return {passes, passes ? (key_bits + passes - 1) / passes : 0};
  }
  int64_t radix() const { return int64_t{1} << bits; }
  uint64_t digit(uint64_t key, int pass) const {
    return key >> (pass * bits) & static_cast<uint64_t>(radix() - 1);
  }
};

// The largest slot of addresses [0, size), or -1; and whether any of them has an unknown field.
struct LargestSlot {
  int64_t slot = -1;
  bool bad = false;

  void add(const int64_t* addresses, int64_t size, int64_t ranks) {
    for (int64_t n = 0; n < size; ++n) {
      bad |= !OwnerCode::valid(addresses[n], ranks);
      slot = std::max(slot, addresses[n] & kSlotMask);
    }
  }
};

// Build the elements of addresses [begin, end) of one bucket, and count the digits of all passes
// in counts [passes, radix]. `base` is the first key of each owner code.
template <typename Access>
void build_accesses(const int64_t* addresses, int64_t begin, int64_t end, const OwnerCode& owner,
                    const uint64_t* base, int position_bits, const Digits& digits, Access* out,
                    uint32_t* counts) {
  for (int64_t position = begin; position < end; ++position) {
    const int64_t address = addresses[position];
    const uint64_t slot = static_cast<uint64_t>(address & kSlotMask);
    const uint64_t key = base[owner(address)] + slot;
    *out++ = Access::of(key, position, position_bits);
    for (int pass = 0; pass < digits.passes; ++pass)
      ++counts[pass * digits.radix() + digits.digit(key, pass)];
  }
}

template <typename Access>
void count_digits(const Access* in, int64_t size, int position_bits, const Digits& digits, int pass,
                  uint32_t* counts) {
  for (int64_t n = 0; n < size; ++n) ++counts[digits.digit(in[n].key(position_bits), pass)];
}

// Counts of each chunk and digit, chunks `stride` apart, become the first place of each. Returns
// whether all elements share one digit, so that the pass would move nothing.
inline bool places_of_counts(uint32_t* counts, int64_t chunks, int64_t stride, int64_t radix,
                             int64_t size) {
  int64_t place = 0;
  for (int64_t digit = 0; digit < radix; ++digit) {
    const int64_t before = place;
    for (int64_t chunk = 0; chunk < chunks; ++chunk) {
      uint32_t& count = counts[chunk * stride + digit];
      const uint32_t here = count;
      count = static_cast<uint32_t>(place);
      place += here;
    }
    if (place - before == size) return true;
  }
  return false;
}

template <typename Access>
void scatter_pass(const Access* in, int64_t size, int position_bits, const Digits& digits, int pass,
                  uint32_t* places, Access* out) {
  for (int64_t n = 0; n < size; ++n)
    out[places[digits.digit(in[n].key(position_bits), pass)]++] = in[n];
}

// Runs that begin in sorted elements [begin, end).
template <typename Access>
int64_t count_runs(const Access* sorted, int64_t begin, int64_t end, int position_bits) {
  int64_t runs = begin == 0 && end > 0;
  for (int64_t n = std::max<int64_t>(begin, 1); n < end; ++n)
    runs += sorted[n].key(position_bits) != sorted[n - 1].key(position_bits);
  return runs;
}

// Positions of sorted elements [begin, end), and first element and key of the runs that begin
// there, to start and key from `run` on.
template <typename Access>
void write_runs(const Access* sorted, int64_t begin, int64_t end, int position_bits,
                int32_t* positions, int32_t* start, int64_t* key) {
  uint64_t last = begin > 0 ? sorted[begin - 1].key(position_bits)
                            : std::numeric_limits<uint64_t>::max();
  for (int64_t n = begin; n < end; ++n) {
    positions[n] = sorted[n].position(position_bits);
    const uint64_t here = sorted[n].key(position_bits);
    if (here == last) continue;
    last = here;
    *start++ = static_cast<int32_t>(n);
    *key++ = static_cast<int64_t>(here);
  }
}

}  // namespace oper
