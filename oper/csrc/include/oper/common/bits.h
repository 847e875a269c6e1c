// Widths of integers in bits.
#pragma once

#include <cstdint>

namespace oper {

// Bits up to the highest that is set; 0 for 0.
inline int bit_width(uint64_t word) { return word ? 64 - __builtin_clzll(word) : 0; }

}  // namespace oper
