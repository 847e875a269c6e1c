// Pieces of the accesses of a row that is read many times. Their gradients are summed piece by
// piece, counted from the row's own first access, and then piece after piece: so that many can work
// on one row, and its sum depends on nothing but its own accesses. The same on processors and
// devices.
#pragma once

#include <cstdint>

#include "oper/common/simd.h"

namespace oper {

constexpr int64_t kAccessesPerPiece = 256;

// Places for partial sums that a device needs for so many accesses: two for each kAccessesPerPiece
// of them (cuda/sum_gradients.cuh), none where no row can have several pieces.
OPER_HD inline int64_t partial_sums(int64_t accesses) {
  if (accesses <= kAccessesPerPiece) return 0;
  return 2 * ((accesses + kAccessesPerPiece - 1) / kAccessesPerPiece);
}

}  // namespace oper
