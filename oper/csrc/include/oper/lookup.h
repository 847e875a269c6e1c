// The all-in-one lookup (OPER, USENIX ATC 2024, §5): the rows of all features of a batch, wherever
// they lie, summed bag by bag into one output.
//
//     out[bag] = sum over the bag's accesses n, in order, of weight[n] · row[address[n]]
//     divided by the bag's length for means; zero where the bag is empty
//
// Work is cut into tiles, each of a few bags of all features, so that parts of the output that lie
// together are written together. Rows come in no order, and each would be waited for: while the
// rows of one block of accesses are read, those of the next are on their way, across bags, features
// and tiles.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "oper/address.h"
#include "oper/rows.h"
#include "oper/simd.h"

namespace oper {

constexpr int64_t kBagsPerTile = 128;
constexpr int64_t kAccessesPerTile = 4096;
constexpr int64_t kBlock = 32;           // rows that are fetched together
constexpr int64_t kFetchedBytes = 1024;  // of a row at most; the hardware sees where it goes on

// The accesses of a batch, and which bags they fall into.
struct Batch {
  const int64_t* addresses;
  int64_t accesses;
  const int32_t* offsets32;  // [bags + 1]; one of the two, or neither: bags hold one access each
  const int64_t* offsets64;
  const float* weights;      // one an access; null for ones
  const Feature* features;
  int64_t feature_count;
  Bases bases;

  // The first access of a bag.
  int64_t first(int64_t bag) const {
    return offsets32 ? offsets32[bag] : offsets64 ? offsets64[bag] : bag;
  }

  // At most one for each bag of the feature that has the most.
  int64_t tiles() const {
    int64_t most = 0;
    for (int64_t f = 0; f < feature_count; ++f) most = std::max(most, features[f].bags);
    return std::min(most, std::max((most + kBagsPerTile - 1) / kBagsPerTile,
                                   accesses / kAccessesPerTile));
  }
};

// What a tile has of a feature: bags [begin, end), counted from the feature's first.
struct Slice {
  const Feature& feature;
  int64_t begin, end;
  int64_t first_access, accesses;

  Slice(const Batch& batch, int64_t f, int64_t tile, int64_t tiles)
      : feature(batch.features[f]),
        begin(feature.bags * tile / tiles),
        end(feature.bags * (tile + 1) / tiles),
        first_access(batch.first(feature.first_bag + begin)),
        accesses(batch.first(feature.first_bag + end) - first_access) {}
};

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

// The rows of all accesses of tiles [tile, last), slice after slice.
class RowStream {
 public:
  RowStream(const Batch& batch, int64_t tile, int64_t last, int64_t tiles)
      : batch_(batch), tile_(tile), last_(last), tiles_(tiles) {
    find_block();
  }

  const uint8_t* next() {
    if (at_ == now_->count) advance();
    return now_->rows[at_++];
  }

  // The next rows, at least one and at most `most` of them, one behind the other; their number is
  // added to `taken`.
  const uint8_t* const* next(int64_t most, int64_t& taken) {
    if (at_ == now_->count) advance();
    const int64_t size = std::min(most, now_->count - at_);
    const uint8_t* const* const rows = now_->rows + at_;
    at_ += size;
    taken += size;
    return rows;
  }

 private:
  struct Block {
    const uint8_t* rows[kBlock];
    int64_t count = 0;
  };

  __attribute__((noinline)) void advance() {
    std::swap(now_, next_);
    at_ = 0;
    find_block();
  }

  // Finds and fetches the rows after those of `now_`.
  void find_block() {
    next_->count = 0;
    while (next_->count < kBlock && (access_ < end_ || next_slice())) {
      const int64_t row_bytes = feature_->row_bytes;
      const int64_t size = std::min(kBlock - next_->count, end_ - access_);
      const int64_t fetched = std::min(row_bytes, kFetchedBytes);
      // To be inlined: compilers take a function that only prefetches for one that does nothing.
      if (row_bytes % 64 == 0)
        with_constant(fetched / 64, [&](auto lines) {
          find(size, [=](const uint8_t* row) __attribute__((always_inline)) {
            for (int64_t line = 0; line < lines; ++line) __builtin_prefetch(row + 64 * line);
          });
        });
      else
        find(size, [=](const uint8_t* row) __attribute__((always_inline)) {
          for (int64_t byte = 0; byte < fetched; byte += 64) __builtin_prefetch(row + byte);
          __builtin_prefetch(row + fetched - 1);  // a row may begin in the middle of a line
        });
    }
  }

  template <typename Fetch>
  OPER_INLINE void find(int64_t size, const Fetch& fetch) {
    const int64_t* const addresses = batch_.addresses + access_;
    const Bases bases = batch_.bases;
    const int64_t width = feature_->width, row_bytes = feature_->row_bytes;
    const uint8_t** const rows = next_->rows + next_->count;
    for (int64_t n = 0; n < size; ++n) {
      const uint8_t* const arena = bases.arena(width, addresses[n]);
      if (__builtin_expect(arena == nullptr, 0)) not_mapped(access_ + n);
      rows[n] = arena + slot_of(addresses[n]) * row_bytes;
      fetch(rows[n]);
    }
    access_ += size;
    next_->count += size;
  }

  // Moves on to the next slice that has accesses, if there is one.
  bool next_slice() {
    for (; tile_ < last_; ++tile_, slice_ = 0)
      while (slice_ < batch_.feature_count) {
        const Slice slice(batch_, slice_++, tile_, tiles_);
        feature_ = &slice.feature;
        access_ = slice.first_access;
        end_ = access_ + slice.accesses;
        if (access_ < end_) return true;
      }
    return false;
  }

  [[noreturn]] void not_mapped(int64_t access) const {
    throw std::out_of_range("addresses: access " + std::to_string(access) + " reads field " +
                            std::to_string(field_of(batch_.addresses[access])) +
                            ", which has no rows of width " + std::to_string(feature_->width) +
                            " here");
  }

  const Batch& batch_;
  Block blocks_[2];
  Block *now_ = blocks_, *next_ = blocks_ + 1;
  int64_t at_ = 0;                             // in `now_`
  int64_t tile_, last_, tiles_, slice_ = 0;    // of the rows to be found next
  const Feature* feature_ = nullptr;
  int64_t access_ = 0, end_ = 0;
};

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

// What is streamed comes to memory in any order, but before what is stored after `finish_stream`.
OPER_INLINE void stream_lines(void* to, const void* from, int64_t bytes) {
#if defined(__x86_64__)
  for (int64_t n = 0; n < bytes / 16; ++n)
    _mm_stream_si128(static_cast<__m128i*>(to) + n,
                     _mm_loadu_si128(static_cast<const __m128i*>(from) + n));
#else
  std::memcpy(to, from, bytes);
#endif
}

inline void finish_stream() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

// Bags of one access whose values are not changed: their rows are copied.
template <typename Row>
OPER_INLINE void copy_slice(const Slice& slice, RowStream& stream, const Output& out) {
  using Value = typename Row::Value;
  for (int64_t i = slice.begin; i < slice.end; ++i) {
    const auto* const from = reinterpret_cast<const Value*>(stream.next());
    auto* const to = reinterpret_cast<Value*>(out.bag(slice.feature, i));
    for (int64_t d = 0; d < slice.feature.dim; ++d) to[d] = from[d];
  }
}

#if defined(__x86_64__)
// Rows of `lines` lines, `stride` bytes apart. Stores of 32 bytes take three quarters of the time of
// those of 16; wider ones are no faster.
template <typename Lines>
__attribute__((target("avx"))) void stream_rows_avx(const uint8_t* const* rows, int64_t count,
                                                    Lines lines, uint8_t* to, int64_t stride) {
  for (int64_t n = 0; n < count; ++n, to += stride) {
    const auto* const from = reinterpret_cast<const __m256i*>(rows[n]);
    auto* const out = reinterpret_cast<__m256i*>(to);
    for (int64_t line = 0; line < lines; ++line) {
      _mm256_stream_si256(out + 2 * line, _mm256_loadu_si256(from + 2 * line));
      _mm256_stream_si256(out + 2 * line + 1, _mm256_loadu_si256(from + 2 * line + 1));
    }
  }
}
#endif

template <typename Lines>
void stream_rows(const uint8_t* const* rows, int64_t count, Lines lines, uint8_t* to,
                 int64_t stride) {
#if defined(__x86_64__)
  static const bool avx = __builtin_cpu_supports("avx");
  if (avx) return stream_rows_avx(rows, count, lines, to, stride);
#endif
  for (int64_t n = 0; n < count; ++n) stream_lines(to + n * stride, rows[n], 64 * lines);
}

// The same, streamed.
inline void stream_slice(const Slice& slice, RowStream& stream, const Output& out) {
  const int64_t stride = slice.feature.out_stride * out.value_bytes();
  with_constant(slice.feature.dim * out.value_bytes() / 64, [&](auto lines) {
    for (int64_t i = slice.begin; i < slice.end;) {
      uint8_t* const to = out.bag(slice.feature, i);
      int64_t count = 0;
      const uint8_t* const* const rows = stream.next(slice.end - i, count);
      stream_rows(rows, count, lines, to, stride);
      i += count;
    }
  });
}

// sum = or += weight · row.
template <typename Row>
OPER_INLINE void add_row(const Row& row, float weight, bool first, int64_t dim, float* sum) {
  if (first) {
    for (int64_t d = 0; d < dim; ++d) sum[d] = weight * row[d];
  } else {
    for (int64_t d = 0; d < dim; ++d) sum[d] += weight * row[d];
  }
}

// The sum of the next `length` > 0 rows, in order; `sum` is no memory of rows.
template <typename Row>
OPER_INLINE void sum_bag(RowStream& stream, int64_t length, const float* weights, int64_t dim,
                         float* __restrict__ sum) {
  if (weights) {
    for (int64_t n = 0; n < length; ++n)
      add_row(Row(stream.next(), dim), weights[n], n == 0, dim, sum);
    return;
  }
  const Row first(stream.next(), dim);
  for (int64_t d = 0; d < dim; ++d) sum[d] = first[d];
  int64_t n = 1;
  for (; n + 4 <= length; n += 4) {
    const Row a(stream.next(), dim), b(stream.next(), dim);
    const Row c(stream.next(), dim), e(stream.next(), dim);
    for (int64_t d = 0; d < dim; ++d) sum[d] = (((sum[d] + a[d]) + b[d]) + c[d]) + e[d];
  }
  for (; n < length; ++n) {
    const Row row(stream.next(), dim);
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
      stream_lines(to, sum, 4 * dim);
    } else if (streamed) {
      round_to(out.type, sum, dim, rounded);
      stream_lines(to, rounded, 2 * dim);
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
