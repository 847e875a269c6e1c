// The all-in-one lookup (OPER, USENIX ATC 2024, §5): the rows of all features of a batch, wherever
// they lie, summed bag by bag into one output.
//
//     out[bag] = sum over the bag's accesses n, in order, of weight[n] · row[address[n]]
//     divided by the bag's length for means; zero where the bag is empty
//
// Rows come in no order, so that each would be waited for. The addresses are known ahead: a row is
// fetched kAhead accesses before it is used, across bags and features. Work is cut into tiles of
// the same bags of all features, so that neighbouring parts of the output are written together.
#pragma once

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>

#include "oper/address.h"
#include "oper/rows.h"
#include "oper/simd.h"

namespace oper {

constexpr int64_t kBagsPerTile = 64;
constexpr int64_t kAhead = 16;  // a power of two

// The accesses of a batch, and which bags they fall into.
struct Batch {
  const int64_t* addresses;
  const int32_t* offsets32;  // [bags + 1]; one of the two, or neither where bags hold one access each
  const int64_t* offsets64;
  const float* weights;      // one an access; null for ones
  const Feature* features;
  int64_t feature_count;
  Bases bases;

  // The first access of a bag.
  int64_t first(int64_t bag) const {
    return offsets32 ? offsets32[bag] : offsets64 ? offsets64[bag] : bag;
  }

  // The greatest number of bags of any feature decides into how many tiles the batch is cut.
  int64_t tiles() const {
    int64_t most = 0;
    for (int64_t f = 0; f < feature_count; ++f) most = std::max(most, features[f].bags);
    return (most + kBagsPerTile - 1) / kBagsPerTile;
  }
};

// The bags [begin, end) of a feature that are in one tile, counted from the feature's first.
struct Slice {
  int64_t begin, end;
  Slice(const Feature& feature, int64_t tile, int64_t tiles)
      : begin(feature.bags * tile / tiles), end(feature.bags * (tile + 1) / tiles) {}
};

// The rows of all accesses of tiles [tile, last), each fetched kAhead before it is handed out.
class RowStream {
 public:
  RowStream(const Batch& batch, int64_t tile, int64_t last, int64_t tiles)
      : batch_(batch), tile_(tile - 1), last_(last), tiles_(tiles), feature_(batch.feature_count) {
    for (int64_t n = 0; n < kAhead; ++n) rows_[n] = fetch();
  }

  OPER_INLINE const uint8_t* next() {
    const uint8_t* const row = rows_[at_];
    rows_[at_] = fetch();
    at_ = (at_ + 1) % kAhead;
    return row;
  }

 private:
  OPER_INLINE const uint8_t* fetch() {
    while (access_ == end_) {
      if (!next_slice()) return nullptr;
    }
    const int64_t address = batch_.addresses[access_++];
    const uint8_t* const arena = batch_.bases.arena(width_, address);
    if (__builtin_expect(arena == nullptr, 0)) not_mapped(address);
    const uint8_t* const row = arena + slot_of(address) * row_bytes_;
    for (int64_t byte = 0; byte < row_bytes_; byte += 64) __builtin_prefetch(row + byte);
    return row;
  }

  bool next_slice() {
    if (feature_ == batch_.feature_count) {
      if (tile_ + 1 >= last_) return false;
      ++tile_;
      feature_ = 0;
    }
    if (feature_ == batch_.feature_count) return false;
    const Feature& feature = batch_.features[feature_++];
    const Slice slice(feature, tile_, tiles_);
    access_ = batch_.first(feature.first_bag + slice.begin);
    end_ = batch_.first(feature.first_bag + slice.end);
    width_ = feature.width;
    row_bytes_ = feature.row_bytes;
    return true;
  }

  [[noreturn]] void not_mapped(int64_t address) const {
    throw std::out_of_range("addresses: access " + std::to_string(access_ - 1) + " reads field " +
                            std::to_string(field_of(address)) + ", which has no rows of width " +
                            std::to_string(width_) + " here");
  }

  const Batch& batch_;
  int64_t tile_, last_, tiles_, feature_;
  int64_t access_ = 0, end_ = 0, width_ = 0, row_bytes_ = 0;
  int64_t at_ = 0;
  const uint8_t* rows_[kAhead];
};

// sum = or += weight · row, elementwise.
template <typename Row>
OPER_INLINE void add_row(const Row& row, float weight, bool first, int64_t dim, float* sum) {
  if (first) {
    for (int64_t d = 0; d < dim; ++d) sum[d] = weight * row[d];
  } else {
    for (int64_t d = 0; d < dim; ++d) sum[d] += weight * row[d];
  }
}

// The sum of `length` > 0 rows of the stream, in order, into `sum`, which is not the rows' memory.
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

// Where the sums go: `type` is kFloat32, kFloat16 or kBFloat16. Streamed, they pass by the caches,
// which an output larger than they are would only empty.
struct Output {
  void* data;
  RowType type;
  bool streamed;

  // Whether values of this bag can be summed in place.
  bool in_place() const { return type == kFloat32 && !streamed; }
};

OPER_INLINE void write(const Output& out, int64_t at, const float* values, int64_t dim) {
  if (out.type == kFloat32) {
    float* const to = static_cast<float*>(out.data) + at;
    for (int64_t d = 0; d < dim; ++d) to[d] = values[d];
  } else {
    uint16_t* const to = static_cast<uint16_t*>(out.data) + at;
    if (out.type == kFloat16)
      for (int64_t d = 0; d < dim; ++d) to[d] = half_of_float(values[d]);
    else
      for (int64_t d = 0; d < dim; ++d) to[d] = bfloat_of_float(values[d]);
  }
}

// The bags of one slice; `scratch` has room for a row.
template <typename Row>
OPER_INLINE void pool_slice(const Batch& batch, const Feature& feature, Slice slice,
                            RowStream& stream, const Output& out, float* scratch) {
  const int64_t dim = feature.dim;
  for (int64_t i = slice.begin; i < slice.end; ++i) {
    const int64_t begin = batch.first(feature.first_bag + i);
    const int64_t length = batch.first(feature.first_bag + i + 1) - begin;
    const int64_t at = feature.out_base + i * feature.out_stride;
    float* const sum = out.in_place() ? static_cast<float*>(out.data) + at : scratch;
    if (length == 0)
      std::fill(sum, sum + dim, 0.0f);
    else
      sum_bag<Row>(stream, length, batch.weights ? batch.weights + begin : nullptr, dim, sum);
    if (feature.mean && length > 1) {
      const float divisor = static_cast<float>(length);
      for (int64_t d = 0; d < dim; ++d) sum[d] /= divisor;
    }
    if (!out.in_place()) write(out, at, sum, dim);
  }
}

// The product of a row and the gradient of its bag's sum: the gradient of the access's weight. In
// sixteen sums, so that the order of additions is the same whatever the vectors' width.
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

}  // namespace oper
