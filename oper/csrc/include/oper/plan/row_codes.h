// The code of a listed row: position << group_bits | group, with the fewest bits that hold any
// group's number, and the row's position in its group. oper/plan/row_codes.py does the same to
// arrays.
#pragma once

#include <algorithm>
#include <cstdint>

#include "oper/common/bits.h"
#include "oper/common/simd.h"

namespace oper {

struct RowCodes {
  int group_bits;

  static RowCodes of(int64_t groups) { return {bits_below(groups)}; }

  // Whether the codes of positions 0 to positions - 1 fit 32 bits.
  bool fit_32_bits(int64_t positions) const { return group_bits + bits_below(positions) <= 32; }

  uint64_t pack(uint64_t group, uint64_t position) const { return position << group_bits | group; }
  OPER_HD uint64_t group(uint64_t code) const { return code & ((uint64_t{1} << group_bits) - 1); }
  OPER_HD uint64_t position(uint64_t code) const { return code >> group_bits; }

 private:
  // Bits that hold any of 0 to count - 1.
  static int bits_below(int64_t count) {
    return bit_width(static_cast<uint64_t>(std::max<int64_t>(count, 1) - 1));
  }
};

}  // namespace oper
