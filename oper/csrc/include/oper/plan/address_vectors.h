// Addresses taken apart eight at a time, where a processor has AVX2 and fields are few.
#pragma once

#if defined(__x86_64__)
#include <immintrin.h>

#include <cstdint>

#include "oper/common/simd.h"
#include "oper/plan/address.h"

#define OPER_AVX2_ADDRESSES __attribute__((target("avx2")))

namespace oper {

inline const bool kAddressVectors = __builtin_cpu_supports("avx2");
constexpr int64_t kMostVectorCodes = 8;  // field codes of which a vector holds a value each

// Eight addresses in the order 0, 1, 4, 5, 2, 3, 6, 7.
struct EightAddresses {
  __m256i slot;  // its lowest 32 bits
  __m256i code;  // field_code
  __m256i rest;  // not 0: the address is negative, or its slot has more bits
};

OPER_AVX2_ADDRESSES OPER_INLINE EightAddresses eight_addresses(const int64_t* addresses) {
  const __m256 first = _mm256_loadu_ps(reinterpret_cast<const float*>(addresses));
  const __m256 last = _mm256_loadu_ps(reinterpret_cast<const float*>(addresses + 4));
  const __m256i low = _mm256_castps_si256(_mm256_shuffle_ps(first, last, 0x88));
  const __m256i high = _mm256_castps_si256(_mm256_shuffle_ps(first, last, 0xDD));
  constexpr int kBits = kSlotBits - 32;  // of the slot, in the higher half
  const __m256i above = _mm256_add_epi32(high, _mm256_set1_epi32(kFieldsAbove << kBits));
  const auto rest = static_cast<int32_t>(1u << 31 | ((1u << kBits) - 1));
  return {low, _mm256_srli_epi32(_mm256_slli_epi32(above, 1), kBits + 1),
          _mm256_and_si256(high, _mm256_set1_epi32(rest))};
}

}  // namespace oper
#endif
