// Which rows the bags of a feature read, and where these lie, on a device.
#pragma once

#include "oper/cuda/device.h"
#include "oper/cuda/launchers.h"
#include "oper/plan/address.h"

namespace oper {

// Where the rows of some accesses lie: access `number(u)` for each u that `there(u)` is. A row's
// place takes two reads, one after the other, and those of all rows go out together.
template <int kRows, typename Number, typename There>
__device__ __forceinline__ void find_rows(const RowArguments& a, const Number& number,
                                          const There& there, const uint8_t* (&row)[kRows]) {
  int64_t address[kRows];
#pragma unroll
  for (int u = 0; u < kRows; ++u)
    address[u] = there(u) ? a.addresses[number(u)] : kLocal << kSlotBits;
  const Bases bases{a.arenas, a.ranks, a.rank};
#pragma unroll
  for (int u = 0; u < kRows; ++u)
    row[u] = bases.arena(0, address[u]) + slot_of(address[u]) * a.row_bytes;
}

// Accesses of a bag.
struct Bag {
  int64_t begin = 0;
  int64_t length = 0;
};

__device__ __forceinline__ Bag bag_at(const RowArguments& a, int64_t bag) {
  if (a.offsets32) return {a.offsets32[bag], a.offsets32[bag + 1] - a.offsets32[bag]};
  if (a.offsets64) return {a.offsets64[bag], a.offsets64[bag + 1] - a.offsets64[bag]};
  return {bag, 1};
}

}  // namespace oper
