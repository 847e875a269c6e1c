// The all-in-one lookup (OPER, USENIX ATC 2024, §5): the rows of all features of a batch, wherever
// they lie, summed bag by bag into one output.
//
//     out[bag] = sum over the bag's accesses n, in order, of weight[n] · row[address[n]]
//     divided by the bag's length for means; zero where the bag is empty
//
// Functions work on one slice: the bags of one feature in one tile (row_stream.h). Here are
// copies of rows and gradients of weights; sums are in pool_bags.h.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "oper/step/dot.h"
#include "oper/step/lookup_output.h"
#include "oper/step/row_stream.h"

namespace oper {

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

// Copies the rows of a slice as copy_slice does, past the caches.
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
