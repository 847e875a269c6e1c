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

constexpr int64_t kAccessesAtOnce = 64;
constexpr int64_t kBagsAhead = 12;          // whose gradients are prefetched
constexpr int64_t kMostFetchedBytes = 256;  // of a gradient or a sum; the hardware sees the rest

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

  // Chunk after chunk: the places of its accesses' sums are found, and fetched, before any is added
  // to.
  template <int kBytes, typename T, typename Offset>
  OPER_INLINE void add_bags(const FeatureGradients<T, Offset>& feature) {
    const auto begin = [&](int64_t bag) -> int64_t {
      return feature.begins ? feature.begins[bag] : feature.first + bag;
    };
    const auto fetched = std::min<int64_t>(dim_ * sizeof(T), kMostFetchedBytes);
    int64_t bag = 0;
    for (int64_t at = feature.first; at < feature.last;) {
      const int64_t stop = find(feature, at);
      for (; begin(bag) < stop; ++bag) {
        const T* const grad = feature.grad + bag * feature.stride;
        const int64_t ahead = std::min(kBagsAhead, feature.bags - 1 - bag) * feature.stride;
        for (int64_t byte = 0; byte < fetched; byte += 64)
          __builtin_prefetch(reinterpret_cast<const char*>(grad + ahead) + byte);
        const int64_t first = std::max(begin(bag), at) - at;
        const int64_t end = begin(bag + 1), last = std::min(end, stop) - at;
        const Bag<T> added{grad, feature.mean ? static_cast<float>(end - begin(bag)) : 1.0f,
                           feature.weights ? feature.weights + at : nullptr, first, last};
        feature.weights ? add_columns_from<kBytes, true>(added, 0)
                        : add_columns_from<kBytes, false>(added, 0);
        if (end > stop) break;  // the rest of the bag is in the next chunk
      }
      at = stop;
      if (ended_ >= 0) end_piece();
    }
  }

  // Finds the sums of a chunk's accesses and counts these, as far as one that ends a piece of its
  // row, which is then `ended_`. Returns where the chunk ends.
  template <typename Feature>
  OPER_INLINE int64_t find(const Feature& feature, int64_t begin) {
    const int32_t* const row = feature.row + begin;
    const int64_t size = std::min(kAccessesAtOnce, feature.last - begin);
    const int64_t dim = dim_, fetched = std::min<int64_t>(4 * dim, kMostFetchedBytes);
    uint16_t* const count = count_.data();
    float* const out = out_;
    for (int64_t n = 0; n < size; ++n) {
      const int32_t of = row[n] - feature.first_row;
      float* const sum = sum_of_[n] = out + of * dim;
      for (int64_t byte = 0; byte < fetched; byte += 64)
        __builtin_prefetch(reinterpret_cast<char*>(sum) + byte, 1);
      if (++count[of] % kAccessesPerPiece == 0) {
        ended_ = of;
        return begin + n + 1;
      }
    }
    return begin + size;
  }

  __attribute__((noinline)) void end_piece() {
    float* const sum = out_ + ended_ * dim_;
    piece_row_.push_back(ended_);
    pieces_.insert(pieces_.end(), sum, sum + dim_);
    std::fill_n(sum, dim_, 0.0f);
    ended_ = -1;
  }

  // What of a bag is in a chunk: accesses [first, last) of it.
  template <typename T>
  struct Bag {
    const T* grad;
    float length;          // that its gradient is divided by
    const float* weights;  // of the chunk's accesses, or null
    int64_t first, last;
  };

  // A bag's gradient to the sums of its accesses: columns [column, column + kVectors · lanes).
  template <int kBytes, int kVectors, bool kWeights, typename T>
  OPER_INLINE void add_columns(const Bag<T>& bag, int64_t column) {
    constexpr int64_t kLanes = Vector<kBytes>::kLanes;
    using Floats = typename Vector<kBytes>::Floats;
    Floats added[kVectors];
    for (int v = 0; v < kVectors; ++v) load<kBytes>(bag.grad + column + v * kLanes, added[v]);
    if (!kWeights && bag.length != 1.0f)
      for (int v = 0; v < kVectors; ++v) added[v] *= 1.0f / bag.length;
    for (int64_t n = bag.first; n < bag.last; ++n) {
      float* const sum = sum_of_[n] + column;
      const float factor = kWeights ? bag.weights[n] / bag.length : 1.0f;
      for (int v = 0; v < kVectors; ++v) {
        Floats value;
        std::memcpy(&value, sum + v * kLanes, kBytes);
        value += kWeights ? added[v] * factor : added[v];
        std::memcpy(sum + v * kLanes, &value, kBytes);
      }
    }
  }

  // Columns [column, dim).
  template <int kBytes, bool kWeights, typename T>
  OPER_INLINE void add_columns_from(const Bag<T>& bag, int64_t column) {
    constexpr int64_t kLanes = Vector<kBytes>::kLanes;
    for (; column + 8 * kLanes <= dim_; column += 8 * kLanes)
      add_columns<kBytes, 8, kWeights>(bag, column);
    if (column + 4 * kLanes <= dim_) {
      add_columns<kBytes, 4, kWeights>(bag, column);
      column += 4 * kLanes;
    }
    if (column + 2 * kLanes <= dim_) {
      add_columns<kBytes, 2, kWeights>(bag, column);
      column += 2 * kLanes;
    }
    for (; column + kLanes <= dim_; column += kLanes) add_columns<kBytes, 1, kWeights>(bag, column);
    if constexpr (kBytes > 4) {
      if (column < dim_) add_columns_from<kBytes / 2, kWeights>(bag, column);
    }
  }

  float* const out_;
  const int64_t rows_, dim_;
  float* sum_of_[kAccessesAtOnce] = {};  // of a chunk's accesses
  std::vector<uint16_t> count_;          // of each row's accesses so far
  int32_t ended_ = -1;                   // the row whose piece ended
  std::vector<int32_t> piece_row_;       // of pieces that ended
  std::vector<float> pieces_;            // their sums [pieces, dim]
};

}  // namespace oper
