// Bits of integers: widths, and those that are set.
#pragma once

#include <cstdint>

#include "oper/common/simd.h"

namespace oper {

// Bits up to the highest that is set; 0 for 0.
inline int bit_width(uint64_t word) { return word ? 64 - __builtin_clzll(word) : 0; }

// Bits that tell so many things apart.
inline int bits_for(int64_t things) {
  return bit_width(things > 1 ? static_cast<uint64_t>(things - 1) : 0);
}

OPER_HD inline int set_bits(uint64_t word) {
#if defined(__CUDA_ARCH__)
  return __popcll(word);
#else
  return __builtin_popcountll(word);
#endif
}

// The number of the lowest bit that is set, of one at least.
OPER_HD inline int lowest_bit(uint64_t word) {
#if defined(__CUDA_ARCH__)
  return __ffsll(static_cast<long long>(word)) - 1;
#else
  return __builtin_ctzll(word);
#endif
}

}  // namespace oper
