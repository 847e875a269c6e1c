// The most that reading random rows can reach: whole rows, fetched `ahead` rows before they are
// copied, past the caches, to consecutive places. Nothing is translated, pooled or checked.
#include <immintrin.h>

#include <algorithm>
#include <cstdint>

namespace {

constexpr int64_t kDim = 64;

void copy(float* to, const float* row) {
#if defined(__AVX512F__)
  for (int64_t d = 0; d < kDim; d += 16) _mm512_stream_ps(to + d, _mm512_loadu_ps(row + d));
#elif defined(__AVX__)
  for (int64_t d = 0; d < kDim; d += 8) _mm256_stream_ps(to + d, _mm256_loadu_ps(row + d));
#else
  for (int64_t d = 0; d < kDim; d += 4) _mm_stream_ps(to + d, _mm_loadu_ps(row + d));
#endif
}

}  // namespace

extern "C" void probe(const float* const* rows, int64_t count, int64_t ahead, float* out) {
  for (int64_t n = 0; n < count; ++n) {
    const float* const row = rows[std::min(n + ahead, count - 1)];
    for (int64_t d = 0; d < kDim; d += 16) __builtin_prefetch(row + d);
    copy(out + n * kDim, rows[n]);
  }
  _mm_sfence();
}
