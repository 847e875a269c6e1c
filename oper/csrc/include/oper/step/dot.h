// The product of two vectors, of which one may be a row.

#pragma once

#include <cstdint>

#include "oper/common/simd.h"

namespace oper {

// Sixteen sums, then by halves, an order that does not depend on the width of the processor's
// vectors, so that ranks on unlike machines agree to the last bit.
template <typename Row, typename Values>
OPER_INLINE float dot(const Row& row, const Values& values, int64_t dim) {
  float sums[16] = {};
  int64_t d = 0;
  for (; d + 16 <= dim; d += 16)
    for (int64_t k = 0; k < 16; ++k) sums[k] += row[d + k] * values[d + k];
  for (int64_t k = 0; d + k < dim; ++k) sums[k] += row[d + k] * values[d + k];
  for (int64_t half = 8; half > 0; half /= 2)
    for (int64_t k = 0; k < half; ++k) sums[k] += sums[k + half];
  return sums[0];
}

}  // namespace oper
