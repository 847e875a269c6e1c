// Stochastic rounding of the values of 16-bit rows: to one of the two neighbours, so that the
// expected result is the value. A step that is less than half of the distance between them then
// moves a row in the mean, where the nearest value would always be the old one.
//
// The random bits are a function of the step's number, the row's slot and the value's place in the
// row: copies of a row are rounded alike on all ranks, a step that is repeated gives the same bits,
// and no state is kept. Rows with one slot number, of other ranks or arenas, share their bits.
#pragma once

#include <cstdint>

#include "oper/common/random.h"
#include "oper/common/simd.h"
#include "oper/step/row_formats.h"

namespace oper {

// What all random bits of a step depend on; 0 is no step's.
OPER_HD inline uint64_t rounding_key(uint64_t step) { return mix(step); }

// The random bits of a row in a step: 32 for each of its values.
struct RowBits {
  uint32_t low, high;

  OPER_HD RowBits(uint64_t key, int64_t slot) {
    const uint64_t word = mix(key + static_cast<uint64_t>(slot));
    low = static_cast<uint32_t>(word);
    high = static_cast<uint32_t>(word >> 32);
  }

  // Two rounds of multiplication and shift, which compilers make vectors of, by the multipliers
  // that Wellons found to mix best ("Hash function prospector", 2018).
  OPER_HD uint32_t of_value(uint32_t d) const {
    uint32_t word = low + d * 0x9e3779b9u;
    word = (word ^ (word >> 16)) * 0x21f0aaadu;
    word = (word ^ (word >> 15) ^ high) * 0x735a2d97u;
    return word ^ (word >> 15);
  }
};

// Adding random bits below the last that is kept carries into it as often as these are large.
OPER_HD inline uint16_t bfloat_of_float(float value, uint32_t random) {
  const uint32_t bits = bits_of_float(value);
  const uint32_t rounded = (bits + (random & 0xFFFF)) >> 16;
  return static_cast<uint16_t>((bits & 0x7FFFFFFF) > 0x7F800000 ? 0x7FC0 : rounded);
}

// All bits where a < b, both below 2^31. Of comparisons compilers make branches here, which would
// keep the loops over values from becoming vectors.
OPER_HD inline uint32_t mask_of_less(uint32_t a, uint32_t b) { return 0u - ((a - b) >> 31); }

// Below 2^-14 a half is a multiple of 2^-24: one more where what is left of that, in parts of 2^24,
// is more than the random bits. Beyond the largest half, 65504, the next neighbour is infinity.
OPER_HD inline uint16_t half_of_float(float value, uint32_t random) {
  constexpr uint32_t kLeastNormal = 0x38800000, kInfinite = 0x47800000;
  const uint32_t bits = bits_of_float(value), magnitude = bits & 0x7FFFFFFF;
  const float units = float_of_bits(magnitude < kLeastNormal ? magnitude : kLeastNormal) * 0x1p24f;
  const auto whole = static_cast<int32_t>(units);
  const auto left = static_cast<int32_t>((units - static_cast<float>(whole)) * 0x1p24f);
  const uint32_t one_more = mask_of_less(random >> 8, static_cast<uint32_t>(left)) & 1;
  const uint32_t subnormal = static_cast<uint32_t>(whole) + one_more;
  const uint32_t normal = (magnitude - 0x38000000 + (random & 0x1FFF)) >> 13;
  const uint32_t beyond = magnitude > 0x7F800000 ? 0x7E00 : 0x7C00;
  const uint32_t is_subnormal = mask_of_less(magnitude, kLeastNormal);
  const uint32_t is_finite = mask_of_less(magnitude, kInfinite);
  const uint32_t finite = (subnormal & is_subnormal) | (normal & ~is_subnormal);
  const uint32_t rounded = (finite & is_finite) | (beyond & ~is_finite);
  return static_cast<uint16_t>(rounded | (bits >> 16 & 0x8000));
}

}  // namespace oper
