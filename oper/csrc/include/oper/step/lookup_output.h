// The output of a lookup, and stores that bypass the caches.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "oper/common/simd.h"
#include "oper/step/feature.h"
#include "oper/step/row_formats.h"

namespace oper {

// Where the sums go: `type` is kFloat32, kFloat16 or kBFloat16. Streamed, they bypass the caches.
struct Output {
  uint8_t* data;
  RowType type;
  bool streamed;

  int64_t value_bytes() const { return type == kFloat32 ? 4 : 2; }

  uint8_t* bag(const Feature& feature, int64_t i) const {
    return data + feature.out(i) * value_bytes();
  }

  // Others than whole lines of the cache would be read and written again for each part.
  bool streams(const Feature& feature) const {
    const int64_t values = feature.out_base | feature.out_stride | feature.dim;
    return streamed && values * value_bytes() % 64 == 0;
  }
};

#if defined(__x86_64__)
inline const bool kAvx = __builtin_cpu_supports("avx");

// Stores of 32 bytes take three quarters of the time of those of 16; wider ones are no faster.
template <typename Lines>
__attribute__((target("avx"))) inline void stream_lines_avx(void* to, const void* from,
                                                            Lines lines) {
  auto* const out = static_cast<__m256i*>(to);
  const auto* const in = static_cast<const __m256i*>(from);
  for (int64_t line = 0; line < lines; ++line) {
    _mm256_stream_si256(out + 2 * line, _mm256_loadu_si256(in + 2 * line));
    _mm256_stream_si256(out + 2 * line + 1, _mm256_loadu_si256(in + 2 * line + 1));
  }
}
#endif

// Stores whole cache lines, bypassing the caches: in any order, but before what is stored after
// `finish_stream`.
inline void stream_lines(void* to, const void* from, int64_t lines) {
#if defined(__x86_64__)
  if (kAvx) return stream_lines_avx(to, from, lines);
  for (int64_t n = 0; n < 4 * lines; ++n)
    _mm_stream_si128(static_cast<__m128i*>(to) + n,
                     _mm_loadu_si128(static_cast<const __m128i*>(from) + n));
#else
  std::memcpy(to, from, 64 * lines);
#endif
}

inline void finish_stream() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

}  // namespace oper
