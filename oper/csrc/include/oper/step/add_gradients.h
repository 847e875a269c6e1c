// Gradients of a batch added up by row, access after access:
//
//     out[row of n] += factor[n] · grad[bag of n]     for the accesses n in order
//
// For batches that read few rows many times: an access need not be brought beside the others of its
// row, as its row's sum is in a cache, and a bag's gradient is read once for all its accesses.
// Pieces of kAccessesPerPiece accesses of a row are summed apart, as in sum_gradients.h, whose sums
// have the same bits.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <unordered_map>
#include <vector>

#include "oper/common/simd.h"
#include "oper/step/sum_gradients.h"

namespace oper {

constexpr int64_t kBagsAhead = 12;          // whose gradients are prefetched
constexpr int64_t kSumsAhead = 64;          // that are prefetched, by accesses
constexpr int64_t kMostFetchedBytes = 256;  // of a gradient; the hardware sees the rest

// The accesses of one feature, and where their gradients lie and go.
template <typename T, typename Offset>
struct FeatureGradients {
  const T* grad;   // of the feature's first bag
  int64_t stride;  // from one bag's gradient to the next one's
  int64_t bags;
  const Offset* begins;  // [bags + 1] of the bags' accesses; null where each bag is an access,
  int64_t first, last;   // of all accesses [first, last)
  bool mean;
  const float* weights;  // of all accesses, or null
  const int32_t* row;    // of all accesses, below `rows` after `first_row` is taken off
  int32_t first_row;
};

// Sums of rows [rows, dim] that gradients are added to; `out` is zeroed here.
class RowSums {
 public:
  RowSums(float* out, int64_t rows, int64_t dim) : out_(out), rows_(rows), dim_(dim), count_(rows) {
    std::fill_n(out, rows * dim, 0.0f);
  }

  template <typename T, typename Offset>
  void add(const FeatureGradients<T, Offset>& feature) {
#if defined(__x86_64__) && defined(__GNUC__)
    static const bool avx2 = __builtin_cpu_supports("avx2");
    if (avx2) return add_avx2(feature);
#endif
    add_bags<16>(feature);
  }

  // Pieces are added up, and all is multiplied by `scale`.
  void finish(float scale) {
    std::unordered_map<int32_t, std::vector<float>> totals;
    for (size_t n = 0; n < piece_row_.size(); ++n) {
      auto& total = totals.try_emplace(piece_row_[n], dim_, 0.0f).first->second;
      for (int64_t d = 0; d < dim_; ++d) total[d] += pieces_[n * dim_ + d];
    }
    for (auto& [row, total] : totals)
      for (int64_t d = 0; d < dim_; ++d) out_[row * dim_ + d] = total[d] + out_[row * dim_ + d];
    if (scale == 1.0f) return;
    for (int64_t n = 0; n < rows_ * dim_; ++n) out_[n] *= scale;
  }

 private:
#if defined(__x86_64__) && defined(__GNUC__)
  // Vectors of 64 bytes would be slower: what one access stores the next one of its row loads, and
  // there are processors that store the two halves of one, which no load of both can wait for.
  template <typename T, typename Offset>
  __attribute__((target("avx2"))) void add_avx2(const FeatureGradients<T, Offset>& feature) {
    add_bags<32>(feature);
  }
#endif

  // Bag after bag, each as far as an access that ends a piece of its row.
  template <int kBytes, typename T, typename Offset>
  OPER_INLINE void add_bags(const FeatureGradients<T, Offset>& feature) {
    const auto begin = [&](int64_t bag) -> int64_t {
      return feature.begins ? feature.begins[bag] : feature.first + bag;
    };
    const auto fetched = std::min<int64_t>(dim_ * sizeof(T), kMostFetchedBytes);
    for (int64_t bag = 0; bag < feature.bags; ++bag) {
      const T* const grad = feature.grad + bag * feature.stride;
      const int64_t ahead = std::min(kBagsAhead, feature.bags - 1 - bag) * feature.stride;
      for (int64_t byte = 0; byte < fetched; byte += 64)
        __builtin_prefetch(reinterpret_cast<const char*>(grad + ahead) + byte);
      const int64_t end = begin(bag + 1), length = end - begin(bag);
      const float divisor = feature.mean ? static_cast<float>(length) : 1.0f;
      const int64_t sums_ahead = end + kSumsAhead <= feature.last ? kSumsAhead : 0;
      for (int64_t at = begin(bag); at < end;) {
        const float* const weights = feature.weights ? feature.weights + at : nullptr;
        const Bag<T> added{grad,     divisor,   weights, feature.row + at, feature.first_row,
                           end - at, sums_ahead};
        const int64_t count =
            weights ? add_rows<kBytes, true>(added) : add_rows<kBytes, false>(added);
        const int32_t last = added.row[count - 1] - feature.first_row;
        if (count_[last] == 0) end_piece(last);
        at += count;
      }
    }
  }

  __attribute__((noinline)) void end_piece(int32_t row) {
    float* const sum = out_ + row * dim_;
    piece_row_.push_back(row);
    pieces_.insert(pieces_.end(), sum, sum + dim_);
    std::fill_n(sum, dim_, 0.0f);
  }

  // Some accesses of a bag.
  template <typename T>
  struct Bag {
    const T* grad;
    float length;          // that its gradient is divided by
    const float* weights;  // of the accesses, or null
    const int32_t* row;    // of the accesses, and of those that are prefetched
    int32_t first_row;
    int64_t accesses, ahead;
  };

  // A bag's gradient to the sums of its accesses: columns [column, column + kVectors · lanes). The
  // first columns count the accesses, and end with one that ends a piece of its row. Returns how
  // many accesses were added to.
  template <int kBytes, int kVectors, bool kWeights, bool kFirst, typename T>
  OPER_INLINE int64_t add_columns(const Bag<T>& bag, int64_t column, int64_t dim) {
    constexpr int64_t kLanes = Vector<kBytes>::kLanes;
    using Floats = typename Vector<kBytes>::Floats;
    // Locals, as the compiler could not know that adding leaves the members alone.
    const int64_t size = bag.accesses, ahead = bag.ahead;
    const int32_t* const row = bag.row;
    const int32_t first_row = bag.first_row;
    float* const out = out_ + column;
    uint8_t* const count = count_.data();
    Floats added[kVectors];
    for (int v = 0; v < kVectors; ++v) load<kBytes>(bag.grad + column + v * kLanes, added[v]);
    if (!kWeights && bag.length != 1.0f)
      for (int v = 0; v < kVectors; ++v) added[v] *= 1.0f / bag.length;
    for (int64_t n = 0; n < size; ++n) {
      const auto* const next =
          reinterpret_cast<const char*>(out + (row[n + ahead] - first_row) * dim);
      for (int64_t byte = 0; byte < kVectors * kBytes; byte += 64)
        __builtin_prefetch(next + byte, 1);
      const int64_t of = row[n] - first_row;
      float* const sum = out + of * dim;
      const float factor = kWeights ? bag.weights[n] / bag.length : 1.0f;
      for (int v = 0; v < kVectors; ++v) {
        Floats value;
        std::memcpy(&value, sum + v * kLanes, kBytes);
        value += kWeights ? added[v] * factor : added[v];
        std::memcpy(sum + v * kLanes, &value, kBytes);
      }
      if (kFirst && ++count[of] == 0) return n + 1;
    }
    return size;
  }

  // All columns, for as many accesses as end no piece but the last. Returns how many.
  template <int kBytes, bool kWeights, typename T>
  OPER_INLINE int64_t add_rows(Bag<T> bag) {
    constexpr int64_t kLanes = Vector<kBytes>::kLanes;
    // Rows of as many values as one group of vectors: loops that know their length take a
    // seventh less.
    switch (dim_) {
      case kLanes: return add_columns<kBytes, 1, kWeights, true>(bag, 0, kLanes);
      case 2 * kLanes: return add_columns<kBytes, 2, kWeights, true>(bag, 0, 2 * kLanes);
      case 4 * kLanes: return add_columns<kBytes, 4, kWeights, true>(bag, 0, 4 * kLanes);
      case 8 * kLanes: return add_columns<kBytes, 8, kWeights, true>(bag, 0, 8 * kLanes);
    }
    int64_t first = 1;
    if (dim_ > 8 * kLanes) {
      first = 8 * kLanes;
      bag.accesses = add_columns<kBytes, 8, kWeights, true>(bag, 0, dim_);
    } else if (dim_ > 2 * kLanes) {
      first = 2 * kLanes;
      bag.accesses = add_columns<kBytes, 2, kWeights, true>(bag, 0, dim_);
    } else {
      bag.accesses = add_columns<4, 1, kWeights, true>(bag, 0, dim_);
    }
    add_columns_from<kBytes, kWeights>(bag, first);
    return bag.accesses;
  }

  // Columns [column, dim).
  template <int kBytes, bool kWeights, typename T>
  OPER_INLINE void add_columns_from(const Bag<T>& bag, int64_t column) {
    constexpr int64_t kLanes = Vector<kBytes>::kLanes;
    const int64_t dim = dim_;
    for (; column + 8 * kLanes <= dim; column += 8 * kLanes)
      add_columns<kBytes, 8, kWeights, false>(bag, column, dim);
    if (column + 4 * kLanes <= dim) {
      add_columns<kBytes, 4, kWeights, false>(bag, column, dim);
      column += 4 * kLanes;
    }
    if (column + 2 * kLanes <= dim) {
      add_columns<kBytes, 2, kWeights, false>(bag, column, dim);
      column += 2 * kLanes;
    }
    for (; column + kLanes <= dim; column += kLanes)
      add_columns<kBytes, 1, kWeights, false>(bag, column, dim);
    if constexpr (kBytes > 4) {
      if (column < dim) add_columns_from<kBytes / 2, kWeights>(bag, column);
    }
  }

  float* const out_;
  const int64_t rows_, dim_;
  std::vector<uint8_t> count_;  // of the accesses so far of each row's last piece
  static_assert(kAccessesPerPiece == 256, "a count comes round to 0 where a piece ends");
  std::vector<int32_t> piece_row_;  // of pieces that ended
  std::vector<float> pieces_;       // their sums [pieces, dim]
};

}  // namespace oper
