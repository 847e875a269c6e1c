// Sums of bags: rows are added in order, in fp32, so that all processors agree to the last bit.
//
// Where there is AVX2, a bag's sum stays in registers until it is stored, bypassing the caches if
// the output is large: up to 128 columns at once, more of them one part after the other.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif

#include "oper/step/lookup_output.h"
#include "oper/step/row_stream.h"

namespace oper {

OPER_INLINE void round_to(RowType type, const float* values, int64_t dim, uint16_t* to) {
  if (type == kFloat16)
    for (int64_t d = 0; d < dim; ++d) to[d] = half_of_float(values[d]);
  else
    for (int64_t d = 0; d < dim; ++d) to[d] = bfloat_of_float(values[d]);
}

// A bag's sum to its place in the output; `rounded` has room for a row of 16 bits.
OPER_INLINE void store_sum(const float* sum, int64_t dim, const Output& out, bool streamed,
                           uint16_t* rounded, uint8_t* to) {
  const void* values = sum;
  if (out.type != kFloat32) {
    round_to(out.type, sum, dim, streamed ? rounded : reinterpret_cast<uint16_t*>(to));
    if (!streamed) return;
    values = rounded;
  }
  const int64_t bytes = dim * out.value_bytes();
  if (streamed)
    stream_lines(to, values, bytes / 64);
  else
    std::memcpy(to, values, bytes);
}

// A sum never lies in the memory of a row, so that the compiler need not check it (ivdep).
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
    if (!in_place) store_sum(sum, dim, out, streamed, rounded, to);
  }
}

#if defined(__x86_64__)
#define OPER_AVX2 __attribute__((target("avx2,f16c")))
#define OPER_AVX2_INLINE OPER_AVX2 OPER_INLINE

// Asked of the processor, as GCC before 11 has no name for it.
inline bool has_f16c() {
  unsigned a, b, c, d;
  return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}

inline const bool kAvx2 = __builtin_cpu_supports("avx2") && has_f16c();

// The values of a row from d to d + 8.
OPER_AVX2_INLINE __m256 eight(const Float32Row& row, int64_t d) {
  return _mm256_loadu_ps(row.values + d);
}

OPER_AVX2_INLINE __m256 eight(const Float16Row& row, int64_t d) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(row.values + d)));
}

OPER_AVX2_INLINE __m256 eight(const BFloat16Row& row, int64_t d) {
  const __m128i values = _mm_loadu_si128(reinterpret_cast<const __m128i*>(row.values + d));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(values), 16));
}

OPER_AVX2_INLINE __m256 eight(const Int8Row& row, int64_t d) {
  const __m128i values = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(row.values + d));
  const __m256 levels = _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(values));
  return _mm256_add_ps(_mm256_mul_ps(_mm256_set1_ps(row.scale), levels), _mm256_set1_ps(row.bias));
}

// Some of a bag's rows: those of one block of the stream, and as many to fetch.
struct Part {
  const uint8_t* const* rows;
  const uint8_t* const* ahead;
  int64_t count;
  const float* weights;
  bool first, last;
};

// A bag's sum: in `partial` between parts, and after the last one in `to`.
struct Sum {
  float* partial;
  float* to;
  bool streamed;
  float divisor;
};

template <typename Row, int kVectors>
OPER_AVX2_INLINE void fetch_columns(const uint8_t* row, int64_t d) {
  constexpr int64_t kSize = sizeof(typename Row::Value), kBytes = 8 * kVectors * kSize;
  fetch_lines(row + d * kSize, std::integral_constant<int64_t, (kBytes + 63) / 64>{});
}

// Columns [d, d + 8·kVectors) of a part.
template <typename Row, int kVectors>
OPER_AVX2_INLINE void add_columns(const Part& part, const Sum& sum, int64_t dim, int64_t d) {
  __m256 sums[kVectors];
  int64_t n = 0;
  if (part.first) {
    fetch_columns<Row, kVectors>(part.ahead[0], d);
    const Row row(part.rows[0], dim);
    for (int k = 0; k < kVectors; ++k) sums[k] = eight(row, d + 8 * k);
    if (part.weights)
      for (int k = 0; k < kVectors; ++k)
        sums[k] = _mm256_mul_ps(_mm256_set1_ps(part.weights[0]), sums[k]);
    n = 1;
  } else {
    for (int k = 0; k < kVectors; ++k) sums[k] = _mm256_loadu_ps(sum.partial + d + 8 * k);
  }
  for (; n < part.count; ++n) {
    fetch_columns<Row, kVectors>(part.ahead[n], d);
    const Row row(part.rows[n], dim);
    if (part.weights) {
      const __m256 weight = _mm256_set1_ps(part.weights[n]);
      for (int k = 0; k < kVectors; ++k)
        sums[k] = _mm256_add_ps(sums[k], _mm256_mul_ps(weight, eight(row, d + 8 * k)));
    } else {
      for (int k = 0; k < kVectors; ++k) sums[k] = _mm256_add_ps(sums[k], eight(row, d + 8 * k));
    }
  }
  if (!part.last) {
    for (int k = 0; k < kVectors; ++k) _mm256_storeu_ps(sum.partial + d + 8 * k, sums[k]);
    return;
  }
  if (sum.divisor != 1.0f)
    for (int k = 0; k < kVectors; ++k)
      sums[k] = _mm256_div_ps(sums[k], _mm256_set1_ps(sum.divisor));
  if (sum.streamed)
    for (int k = 0; k < kVectors; ++k) _mm256_stream_ps(sum.to + d + 8 * k, sums[k]);
  else
    for (int k = 0; k < kVectors; ++k) _mm256_storeu_ps(sum.to + d + 8 * k, sums[k]);
}

// All columns of a part: 8·kVectors, or if that is 0 any multiple of 8.
template <typename Row, int kVectors>
OPER_AVX2_INLINE void add_part(const Part& part, const Sum& sum, int64_t dim, int64_t last_byte) {
  if constexpr (kVectors > 0) {
    add_columns<Row, kVectors>(part, sum, dim, 0);
  } else {
    // A row may begin in the middle of a line, and then end in one that no columns begin in.
    for (int64_t n = 0; n < part.count; ++n) __builtin_prefetch(part.ahead[n] + last_byte);
    int64_t d = 0;
    for (; d + 128 <= dim; d += 128) add_columns<Row, 16>(part, sum, dim, d);
    if (d + 64 <= dim) add_columns<Row, 8>(part, sum, dim, d), d += 64;
    if (d + 32 <= dim) add_columns<Row, 4>(part, sum, dim, d), d += 32;
    if (d + 16 <= dim) add_columns<Row, 2>(part, sum, dim, d), d += 16;
    if (d + 8 <= dim) add_columns<Row, 1>(part, sum, dim, d);
  }
}

// Pools a slice as pool_slice does: rows of 8·kVectors values in whole lines of the cache, or if
// kVectors is 0 of any multiple of 8 values.
template <typename Row, int kVectors>
OPER_AVX2 void pool_vectors(const Batch& batch, const Slice& slice, RowStream& stream,
                            const Output& out, float* scratch) {
  const Feature& feature = slice.feature;
  const int64_t dim = feature.dim;
  const int64_t last_byte = bytes_of_row(feature.dtype, dim) - 1;
  const int64_t fetched_bytes = std::min(feature.row_bytes, kFetchedBytes);
  const bool streamed = out.streams(feature), direct = out.type == kFloat32;
  auto* const rounded = reinterpret_cast<uint16_t*>(scratch + dim);
  for (int64_t i = slice.begin; i < slice.end; ++i) {
    const int64_t begin = batch.first(feature.first_bag + i);
    const int64_t length = batch.first(feature.first_bag + i + 1) - begin;
    uint8_t* const to = out.bag(feature, i);
    const Sum sum{scratch, direct ? reinterpret_cast<float*>(to) : scratch, direct && streamed,
                  feature.mean ? static_cast<float>(length) : 1.0f};
    for (int64_t done = 0; done < length;) {
      const Rows rows = stream.next(length - done);
      const float* const weights = batch.weights ? batch.weights + begin + done : nullptr;
      Part part{rows.rows, rows.ahead, rows.count, weights, done == 0, done + rows.count == length};
      if (rows.fetched_bytes != fetched_bytes) {  // those ahead are of another feature
        for (int64_t n = 0; n < rows.count; ++n) fetch(rows.ahead[n], rows.fetched_bytes);
        part.ahead = rows.rows;
      }
      add_part<Row, kVectors>(part, sum, dim, last_byte);
      done += rows.count;
    }
    if (length == 0) std::fill(scratch, scratch + dim, 0.0f);
    if (length == 0 || !direct) store_sum(scratch, dim, out, streamed, rounded, to);
  }
}

template <typename Row>
void pool_avx2(const Batch& batch, const Slice& slice, RowStream& stream, const Output& out,
               float* scratch) {
  const Feature& feature = slice.feature;
  switch (feature.row_bytes % 64 == 0 ? feature.dim : 0) {
    case 16: return pool_vectors<Row, 2>(batch, slice, stream, out, scratch);
    case 32: return pool_vectors<Row, 4>(batch, slice, stream, out, scratch);
    case 64: return pool_vectors<Row, 8>(batch, slice, stream, out, scratch);
    case 128: return pool_vectors<Row, 16>(batch, slice, stream, out, scratch);
    default: return pool_vectors<Row, 0>(batch, slice, stream, out, scratch);
  }
}
#endif

}  // namespace oper
