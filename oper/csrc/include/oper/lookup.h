// The all-in-one lookup (OPER, USENIX ATC 2024, §5): the rows of all features of a batch, wherever
// they lie, summed bag by bag into one output.
//
//     out[bag] = sum over the bag's accesses n, in order, of weight[n] · row[address[n]]
//     divided by the bag's length for means; zero where the bag is empty
//
// Functions work on one slice: the bags of one feature in one tile (oper/row_stream.h).
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "oper/row_stream.h"

namespace oper {

// Where the sums go: `type` is kFloat32, kFloat16 or kBFloat16. Streamed, they pass by the caches.
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

// Whole lines of the cache, past it; they come to memory in any order, but before what is stored
// after `finish_stream`.
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

// Bags of one access whose values are not changed: their rows are copied.
OPER_INLINE void copy_slice(const Slice& slice, RowStream& stream, const Output& out) {
  const auto copy = [&](auto bytes) __attribute__((always_inline)) {
    for (int64_t i = slice.begin; i < slice.end;) {
      const Rows rows = stream.next(slice.end - i);
      for (int64_t n = 0; n < rows.count; ++n, ++i) {
        fetch(rows.ahead[n], rows.fetched_bytes);
        std::memcpy(out.bag(slice.feature, i), rows.rows[n], bytes);
      }
    }
  };
  const int64_t bytes = slice.feature.dim * out.value_bytes();
  if (bytes == 64) return copy(std::integral_constant<int64_t, 64>{});
  if (bytes == 128) return copy(std::integral_constant<int64_t, 128>{});
  if (bytes == 256) return copy(std::integral_constant<int64_t, 256>{});
  copy(bytes);
}

// Rows of `lines` lines to places `stride` bytes apart; of those ahead, `ahead` lines are fetched.
#if defined(__x86_64__)
template <typename Lines, typename Ahead>
__attribute__((target("avx"))) void stream_rows_avx(const Rows& rows, Lines lines, Ahead ahead,
                                                    uint8_t* to, int64_t stride) {
  for (int64_t n = 0; n < rows.count; ++n) {
    fetch_lines(rows.ahead[n], ahead);
    stream_lines_avx(to + n * stride, rows.rows[n], lines);
  }
}
#endif

template <typename Lines, typename Ahead>
void stream_rows(const Rows& rows, Lines lines, Ahead ahead, uint8_t* to, int64_t stride) {
#if defined(__x86_64__)
  if (kAvx) return stream_rows_avx(rows, lines, ahead, to, stride);
#endif
  for (int64_t n = 0; n < rows.count; ++n) {
    fetch_lines(rows.ahead[n], ahead);
    stream_lines(to + n * stride, rows.rows[n], lines);
  }
}

// f(n) with a common number as a constant, so that loops to it are unrolled.
template <typename F>
OPER_INLINE void with_constant(int64_t n, const F& f) {
  switch (n) {
    case 1: return f(std::integral_constant<int64_t, 1>{});
    case 2: return f(std::integral_constant<int64_t, 2>{});
    case 4: return f(std::integral_constant<int64_t, 4>{});
    case 8: return f(std::integral_constant<int64_t, 8>{});
    default: return f(n);
  }
}

// As copy_slice, streamed.
inline void stream_slice(const Slice& slice, RowStream& stream, const Output& out) {
  const int64_t stride = slice.feature.out_stride * out.value_bytes();
  with_constant(slice.feature.dim * out.value_bytes() / 64, [&](auto lines) {
    for (int64_t i = slice.begin; i < slice.end;) {
      const Rows rows = stream.next(slice.end - i);
      const int64_t ahead = (rows.fetched_bytes + 63) / 64;
      uint8_t* const to = out.bag(slice.feature, i);
      ahead == lines ? stream_rows(rows, lines, lines, to, stride)
                     : stream_rows(rows, lines, ahead, to, stride);
      i += rows.count;
    }
  });
}

// Sums are no memory of rows, so that loops over both need no check of it (ivdep).
//
// sum = or += weight · row.
template <typename Row>
OPER_INLINE void add_row(const Row& row, float weight, bool first, int64_t dim, float* sum) {
  if (first) {
#pragma GCC ivdep
    for (int64_t d = 0; d < dim; ++d) sum[d] = weight * row[d];
  } else {
#pragma GCC ivdep
    for (int64_t d = 0; d < dim; ++d) sum[d] += weight * row[d];
  }
}

// The sum of the next `length` > 0 rows, in order.
template <typename Row>
OPER_INLINE void sum_bag(RowStream& stream, int64_t length, const float* weights, int64_t dim,
                         float* __restrict__ sum) {
  if (weights) {
    for (int64_t n = 0; n < length; ++n)
      add_row(Row(stream.next(), dim), weights[n], n == 0, dim, sum);
    return;
  }
  const Row first(stream.next(), dim);
#pragma GCC ivdep
  for (int64_t d = 0; d < dim; ++d) sum[d] = first[d];
  int64_t n = 1;
  for (; n + 4 <= length; n += 4) {
    const Row a(stream.next(), dim), b(stream.next(), dim);
    const Row c(stream.next(), dim), e(stream.next(), dim);
#pragma GCC ivdep
    for (int64_t d = 0; d < dim; ++d) sum[d] = (((sum[d] + a[d]) + b[d]) + c[d]) + e[d];
  }
  for (; n < length; ++n) {
    const Row row(stream.next(), dim);
#pragma GCC ivdep
    for (int64_t d = 0; d < dim; ++d) sum[d] += row[d];
  }
}

OPER_INLINE void round_to(RowType type, const float* values, int64_t dim, uint16_t* to) {
  if (type == kFloat16)
    for (int64_t d = 0; d < dim; ++d) to[d] = half_of_float(values[d]);
  else
    for (int64_t d = 0; d < dim; ++d) to[d] = bfloat_of_float(values[d]);
}

// The bags of a slice; `scratch` has room for two rows of fp32.
template <typename Row>
OPER_INLINE void pool_slice(const Batch& batch, const Slice& slice, RowStream& stream,
                            const Output& out, float* scratch) {
  const Feature& feature = slice.feature;
  const int64_t dim = feature.dim;
  const bool streamed = out.streams(feature), in_place = out.type == kFloat32 && !streamed;
  auto* const rounded = reinterpret_cast<uint16_t*>(scratch + dim);
  for (int64_t i = slice.begin; i < slice.end; ++i) {
    const int64_t begin = batch.first(feature.first_bag + i);
    const int64_t length = batch.first(feature.first_bag + i + 1) - begin;
    uint8_t* const to = out.bag(feature, i);
    float* const sum = in_place ? reinterpret_cast<float*>(to) : scratch;
    if (length == 0)
      std::fill(sum, sum + dim, 0.0f);
    else
      sum_bag<Row>(stream, length, batch.weights ? batch.weights + begin : nullptr, dim, sum);
    if (feature.mean && length > 1) {
      const float divisor = static_cast<float>(length);
      for (int64_t d = 0; d < dim; ++d) sum[d] /= divisor;
    }
    if (in_place) continue;
    if (out.type == kFloat32) {
      stream_lines(to, sum, dim / 16);
    } else if (streamed) {
      round_to(out.type, sum, dim, rounded);
      stream_lines(to, rounded, dim / 32);
    } else {
      round_to(out.type, sum, dim, reinterpret_cast<uint16_t*>(to));
    }
  }
}

// The product of a row and the gradient of its bag's sum. In sixteen sums, so that the order of
// additions is the same whatever the vectors' width.
template <typename Row, typename Grad>
OPER_INLINE float dot(const Row& row, const Grad& grad, int64_t dim) {
  float sums[16] = {};
  int64_t d = 0;
  for (; d + 16 <= dim; d += 16)
    for (int64_t k = 0; k < 16; ++k) sums[k] += row[d + k] * grad[d + k];
  for (int64_t k = 0; d + k < dim; ++k) sums[k] += row[d + k] * grad[d + k];
  for (int64_t half = 8; half > 0; half /= 2)
    for (int64_t k = 0; k < half; ++k) sums[k] += sums[k + half];
  return sums[0];
}

// The gradients of the weights of a slice's accesses.
template <typename Row, typename Grad>
OPER_INLINE void differentiate_slice(const Batch& batch, const Slice& slice, RowStream& stream,
                                     const uint8_t* grad, float* weight_grad) {
  const Feature& feature = slice.feature;
  for (int64_t i = slice.begin; i < slice.end; ++i) {
    const int64_t begin = batch.first(feature.first_bag + i);
    const int64_t end = batch.first(feature.first_bag + i + 1);
    const Grad of_sum(grad + feature.out(i) * sizeof(typename Grad::Value), feature.dim);
    const float divisor = feature.mean ? static_cast<float>(end - begin) : 1.0f;
    for (int64_t n = begin; n < end; ++n)
      weight_grad[n] = dot(Row(stream.next(), feature.dim), of_sum, feature.dim) / divisor;
  }
}

}  // namespace oper
