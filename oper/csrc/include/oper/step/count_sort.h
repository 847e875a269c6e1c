// The accesses of a batch sorted by the row they read, by counting: where the rows that a batch may
// name are not many more than its accesses, a counter for each of them takes less time than the
// passes of sort.h. The result is the same.
#pragma once

#include <cstdint>

#include "oper/step/sort.h"

namespace oper {

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
