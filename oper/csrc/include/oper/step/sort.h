// The accesses of a batch, sorted by the row they read, so that every row's accesses are one run.
//
// Rows are ordered by (bucket, owner code, slot). All (bucket, owner code) pairs together number
// the rows they may name without gaps, as far as the largest slot of the batch, so that a key has
// no more bits than it needs. Accesses are called by a number, their position or their bag.
//
// There are two ways, with one result. A stable radix sort from the lowest digit up moves words
// that key and number share where they fit. Where the rows that a batch may name are not many more
// than its accesses, counting takes less time than those passes: each row has a counter.
#pragma once

#include <algorithm>
#include <cstdint>

#include "oper/common/simd.h"
#include "oper/plan/address.h"

namespace oper {

// Accesses of one feature: addresses [begin, end), elements of the sort from `element` on.
struct SortedSegment {
  int64_t begin, end;
  int64_t element;
  int64_t bucket;
};

// What bounds the addresses of a bucket: no field code and no slot is larger.
struct Extent {
  uint64_t field_code = 0;
  int64_t slot = -1;
};

OPER_INLINE void extend(const int64_t* addresses, int64_t size, Extent& extent) {
  constexpr uint64_t kSign = uint64_t{1} << 63;
  uint64_t sign = 0, largest = 0;
  int64_t slot = extent.slot;
  for (int64_t n = 0; n < size; ++n) {
    const auto address = static_cast<uint64_t>(addresses[n]);
    sign |= address;
    largest = std::max(largest, (address + (kFieldsAbove << kSlotBits)) & ~kSign);
    slot = std::max(slot, slot_of(addresses[n]));
  }
  // A negative address is of no field.
  extent.field_code = std::max(extent.field_code, (sign & kSign ? ~kSign : largest) >> kSlotBits);
  extent.slot = slot;
}

// Key and number in one word.
struct NarrowAccess {
  uint64_t word;

  static NarrowAccess of(uint64_t key, int64_t number, int number_bits) {
    return {key << number_bits | static_cast<uint64_t>(number)};
  }
  uint64_t key(int number_bits) const { return word >> number_bits; }
  int32_t number(int number_bits) const {
    return static_cast<int32_t>(word & ((uint64_t{1} << number_bits) - 1));
  }
};

// For more rows and accesses than 64 bits can tell apart.
struct WideAccess {
  uint64_t word;
  int64_t at;

  static WideAccess of(uint64_t key, int64_t number, int) { return {key, number}; }
  uint64_t key(int) const { return word; }
  int32_t number(int) const { return static_cast<int32_t>(at); }
};

// How a key is cut into digits.
struct Digits {
  // Digits of 13 bits scatter to more lines than the first cache holds, and still two passes of
  // them take less time than three of 9.
  static constexpr int kMostBits = 13;

  int passes;
  int bits;

  static Digits of(int key_bits) {
    const int passes = (key_bits + kMostBits - 1) / kMostBits;
    return {passes, passes ? (key_bits + passes - 1) / passes : 0};
  }
  int64_t radix() const { return int64_t{1} << bits; }
};

// The elements of addresses [begin, end) of one bucket, which `number_of` calls by their positions
// in order; the digits of all passes are counted in
// counts [passes, radix]. `base` is the first key of each field code.
template <int kPasses, typename Access, typename NumberOf>
void build_accesses(const int64_t* addresses, int64_t begin, int64_t end, const uint64_t* base,
                    int number_bits, const Digits& digits, NumberOf number_of, Access* out,
                    uint32_t* counts) {
  const int bits = digits.bits;
  const int64_t radix = digits.radix();
  for (int64_t position = begin; position < end; ++position) {
    const auto address = static_cast<uint64_t>(addresses[position]);
    const uint64_t key = base[field_code(address)] + (address & kSlotMask);
    *out++ = Access::of(key, number_of(position), number_bits);
    for (int pass = 0; pass < kPasses; ++pass)
      ++counts[pass * radix + static_cast<int64_t>(key >> (pass * bits) & (radix - 1))];
  }
}

template <typename Access>
void count_digits(const Access* in, int64_t size, int number_bits, const Digits& digits, int pass,
                  uint32_t* counts) {
  const int shift = pass * digits.bits;
  const uint64_t mask = digits.radix() - 1;
  for (int64_t n = 0; n < size; ++n) ++counts[in[n].key(number_bits) >> shift & mask];
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
void scatter_pass(const Access* in, int64_t size, int number_bits, const Digits& digits, int pass,
                  uint32_t* places, Access* out) {
  const int shift = pass * digits.bits;
  const uint64_t mask = digits.radix() - 1;
  for (int64_t n = 0; n < size; ++n) out[places[in[n].key(number_bits) >> shift & mask]++] = in[n];
}

// Numbers of sorted elements [begin, end), and the elements at which runs start, whose number is
// returned; there is room for end - begin of them, as each is written before it is known to be one.
template <typename Access>
int64_t find_runs(const Access* sorted, int64_t begin, int64_t end, int number_bits,
                  int32_t* numbers, int32_t* start) {
  int64_t runs = 0;
  uint64_t last = begin > 0 ? sorted[begin - 1].key(number_bits) : 0;
  for (int64_t n = begin; n < end; ++n) {
    numbers[n] = sorted[n].number(number_bits);
    const uint64_t key = sorted[n].key(number_bits);
    start[runs] = static_cast<int32_t>(n);
    runs += n == 0 || key != last;
    last = key;
  }
  return runs;
}

// Sorting by counting.

// Accesses [begin, end) of one bucket; `base` is the first key of each field code.
inline void count_keys(const int64_t* addresses, int64_t begin, int64_t end, const uint64_t* base,
                       uint32_t* counts) {
  for (int64_t n = begin; n < end; ++n) {
    const auto address = static_cast<uint64_t>(addresses[n]);
    ++counts[base[field_code(address)] + (address & kSlotMask)];
  }
}

// Counts of each chunk and key become the first place of each. Runs begin at start [runs + 1], and
// are of the keys slot [runs]; there is room for one more of each.
inline void places_of_keys(uint32_t* counts, int64_t chunks, int64_t keys, int32_t* start,
                           int64_t* slot) {
  int64_t runs = 0;
  uint32_t place = 0;
  for (int64_t key = 0; key < keys; ++key) {
    start[runs] = static_cast<int32_t>(place);
    slot[runs] = key;
    const uint32_t before = place;
    for (int64_t chunk = 0; chunk < chunks; ++chunk) {
      uint32_t& count = counts[chunk * keys + key];
      const uint32_t here = count;
      count = place;
      place += here;
    }
    runs += place > before;
  }
  start[runs] = static_cast<int32_t>(place);
}

// Puts accesses [begin, end) where they belong: the position, or whatever `number_of` makes of it.
template <typename NumberOf>
void place_accesses(const int64_t* addresses, int64_t begin, int64_t end, const uint64_t* base,
                    uint32_t* places, NumberOf number_of, int32_t* sorted) {
  for (int64_t n = begin; n < end; ++n) {
    const auto address = static_cast<uint64_t>(addresses[n]);
    uint32_t& place = places[base[field_code(address)] + (address & kSlotMask)];
    sorted[place++] = static_cast<int32_t>(number_of(n));
  }
}

}  // namespace oper
