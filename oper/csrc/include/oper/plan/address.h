// Addresses of rows, (field << 40) | slot, and the pointers they stand for (oper/plan/layout.py).
//
// `field` is the rank that holds the row, or kLocal where the reader's own copy is read; `slot`
// indexes that rank's arena of the row's width. A rank sees the arenas of all ranks whose memory is
// mapped, and as one more, numbered `ranks`, the rows that it fetched from the others.
#pragma once

#include <cstdint>

#include "oper/common/simd.h"

namespace oper {

constexpr int kSlotBits = 40;
constexpr int64_t kLocal = 0x7FFFFF;
constexpr int64_t kReplica = kLocal - 1;  // the reader's own copy of a row that all ranks hold
constexpr int64_t kSlotMask = (int64_t{1} << kSlotBits) - 1;

OPER_HD inline int64_t field_of(int64_t address) { return address >> kSlotBits; }
OPER_HD inline int64_t slot_of(int64_t address) { return address & kSlotMask; }
OPER_HD inline int64_t make_address(int64_t field, int64_t slot) {
  return field << kSlotBits | slot;
}

// Which of `ranks + 2` an address's field is: 0 for a replica, 1 for a row of the reader's own,
// 2 + r for one of rank r; any other is not a field. The two highest fields come round to 0.
constexpr uint64_t kFieldsAbove = 2;
static_assert(kReplica + kFieldsAbove == 1 << 23 && kLocal == kReplica + 1);

inline uint64_t field_code(uint64_t address) {
  return (address + (kFieldsAbove << kSlotBits)) << 1 >> (kSlotBits + 1);
}

// Where each rank's arena of each width begins, as `rank` sees it: [widths, ranks + 1].
struct Bases {
  const int64_t* pointers;
  int64_t ranks;
  int64_t rank;

  // Null where the arena is not mapped here, or the address is of no arena.
  OPER_HD const uint8_t* arena(int64_t width, int64_t address) const {
    int64_t field = field_of(address);
    field = field >= kReplica ? rank : field;
    if (static_cast<uint64_t>(field) > static_cast<uint64_t>(ranks)) return nullptr;
    return reinterpret_cast<const uint8_t*>(pointers[width * (ranks + 1) + field]);
  }
};

}  // namespace oper
