// 64-bit digests of rows, by which ranks compare their copies of the replicas.
#pragma once

#include <cstdint>
#include <cstring>

#include "oper/common/random.h"

namespace oper {

// The digest of `size` bytes, chained to the one of what came before.
inline uint64_t digest(const uint8_t* bytes, int64_t size, uint64_t before) {
  uint64_t state = mix(before + static_cast<uint64_t>(size));
  for (; size > 0; bytes += 8, size -= 8) {
    uint64_t word = 0;
    std::memcpy(&word, bytes, size < 8 ? size : 8);
    state = mix(state ^ word);
  }
  return state;
}

}  // namespace oper
