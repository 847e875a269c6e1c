// Gradients of a batch summed by row: for every run of accesses of one row,
//
//     out[run] = scale · sum over the run's accesses n, in order, of factor[n] · grad[bag of n]
//
// Gradients lie in no order, so a task first finds the places of its accesses' gradients, and then
// sums while those of later accesses are on their way. A sum is held in registers: columns are
// taken 8 vectors, then 4, 2 and 1 at a time, the rest by narrower vectors.
//
// A run longer than a piece is summed piece by piece (pieces.h).
//
// Sums are stored as usual: streaming them past the caches gained 5 % here and lost more where
// they are merged next.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "oper/common/simd.h"
#include "oper/step/pieces.h"

namespace oper {

constexpr int64_t kBytesAhead = 8192;  // of gradients that are prefetched before they are summed
constexpr int64_t kMostAhead = 128;    // accesses

// A gradient's value in 16 bits; the rest is in the conversions below.
struct Half {
  uint16_t bits;
};
struct BFloat {
  uint16_t bits;
};

// Which elements of the gradient belong to an access, by its position in the batch or by its bag.
struct GradientPlaces {
  struct Segment {
    int64_t end;     // of the feature's accesses, or of its bags where accesses go by bag
    int64_t origin;  // bag b's gradient is at origin + b · stride
    int64_t stride;
    bool mean;
  };

  std::vector<Segment> segments;       // of all features
  bool by_bag = false;                 // accesses are called by their bags
  const int32_t* bag_of = nullptr;     // by position; null where by_bag, or every access is a bag
  const int32_t* offsets32 = nullptr;  // of bags; one of the two unless every access is a bag
  const int64_t* offsets64 = nullptr;

  // The first element of each bag's gradient, where accesses are called by their bags and these are
  // not found by the reciprocal below.
  std::vector<int64_t> place_of_bag;

  // How a position, or a bag, leads to its segment. Where no segment is empty and all have one
  // length and stride: segment = position · reciprocal >> shift, exact as 2^shift exceeds the
  // accesses times the length. Otherwise shift is 0, and positions are looked up by blocks of
  // 2^block_bits, about a thousand, few of which hold the end of a segment.
  int shift = 0;
  uint32_t reciprocal = 0;
  uint32_t stride = 0;
  std::vector<int64_t> origin;
  int block_bits = 0;
  std::vector<int32_t> segment_of_block;  // of a block's first access

  // `segments` are set.
  void index() {
    const int64_t accesses = segments.back().end, length = segments.front().end;
    bool even = length > 0 && length * static_cast<int64_t>(segments.size()) == accesses;
    for (size_t s = 0; s < segments.size(); ++s) {
      even &= segments[s].end == static_cast<int64_t>(s + 1) * length;
      even &= segments[s].stride == segments[0].stride;
      origin.push_back(segments[s].origin);
    }
    stride = static_cast<uint32_t>(segments[0].stride);
    if (even && stride == segments[0].stride) {
      while (int64_t{1} << shift <= accesses * length) ++shift;
      reciprocal = static_cast<uint32_t>(((int64_t{1} << shift) + length - 1) / length);
    }
    if (by_bag && !shift) {
      int64_t bag = 0;
      for (const Segment& segment : segments)
        for (; bag < segment.end; ++bag)
          place_of_bag.push_back(segment.origin + bag * segment.stride);
    }
    while (accesses >> block_bits > 1024) ++block_bits;
    int32_t segment = 0;
    for (int64_t first = 0; first < accesses; first += int64_t{1} << block_bits) {
      while (first >= segments[segment].end) ++segment;
      segment_of_block.push_back(segment);
    }
  }

  const Segment& segment_of(int64_t position) const {
    const Segment* found = segments.data() + segment_of_block[position >> block_bits];
    while (position >= found->end) ++found;
    return *found;
  }

  int64_t length(int64_t bag) const {
    return offsets32 ? offsets32[bag + 1] - offsets32[bag] : offsets64[bag + 1] - offsets64[bag];
  }
};

// The first element of the gradient of each of `size` accesses.
OPER_INLINE void find_gradients(const GradientPlaces& places, const int32_t* positions,
                                int64_t size, int64_t* place) {
  if (places.bag_of) {
    for (int64_t n = 0; n < size; ++n) {
      const auto& segment = places.segment_of(positions[n]);
      place[n] = segment.origin + places.bag_of[positions[n]] * segment.stride;
    }
  } else if (places.shift) {
    const int64_t* const origin = places.origin.data();
    const uint64_t reciprocal = places.reciprocal, stride = places.stride;
    const int shift = places.shift;
    for (int64_t n = 0; n < size; ++n) {
      const uint64_t position = static_cast<uint32_t>(positions[n]);
      place[n] = origin[position * reciprocal >> shift] + static_cast<int64_t>(position * stride);
    }
  } else if (!places.place_of_bag.empty()) {
    const int64_t* const of_bag = places.place_of_bag.data();
    for (int64_t n = 0; n < size; ++n) place[n] = of_bag[positions[n]];
  } else {
    for (int64_t n = 0; n < size; ++n) {
      const auto& segment = places.segment_of(positions[n]);
      place[n] = segment.origin + positions[n] * segment.stride;
    }
  }
}

// What the gradient of each of `size` accesses is multiplied by: its weight (none: 1), divided by
// the length of its bag for means.
inline void find_factors(const GradientPlaces& places, const float* weights,
                         const int32_t* positions, int64_t size, float* factor) {
  for (int64_t n = 0; n < size; ++n) factor[n] = weights ? weights[positions[n]] : 1.0f;
  if (!places.bag_of && !places.by_bag) return;
  for (int64_t n = 0; n < size; ++n) {
    if (!places.segment_of(positions[n]).mean) continue;
    const int64_t bag = places.by_bag ? positions[n] : places.bag_of[positions[n]];
    factor[n] /= static_cast<float>(places.length(bag));
  }
}

template <int kBytes>
struct Vector {
  static constexpr int kLanes = kBytes / 4;
  typedef float Floats __attribute__((vector_size(kBytes)));
  typedef uint32_t Words __attribute__((vector_size(kBytes)));
  typedef uint16_t Shorts __attribute__((vector_size(kBytes / 2)));
};

template <int kBytes>
OPER_INLINE void load(const float* from, typename Vector<kBytes>::Floats& to) {
  std::memcpy(&to, from, kBytes);
}

template <int kBytes>
OPER_INLINE void load(const BFloat* from, typename Vector<kBytes>::Floats& to) {
  typename Vector<kBytes>::Shorts shorts;
  std::memcpy(&shorts, from, sizeof(shorts));
  to = reinterpret_cast<typename Vector<kBytes>::Floats>(
      __builtin_convertvector(shorts, typename Vector<kBytes>::Words) << 16);
}

// An fp16 with its exponent in fp32's place is too small by 2^112, subnormal or not.
template <int kBytes>
OPER_INLINE void load(const Half* from, typename Vector<kBytes>::Floats& to) {
  using Floats = typename Vector<kBytes>::Floats;
  using Words = typename Vector<kBytes>::Words;
  typename Vector<kBytes>::Shorts shorts;
  std::memcpy(&shorts, from, sizeof(shorts));
  const Words word = __builtin_convertvector(shorts, Words);
  const Words shifted = (word & 0x7FFF) << 13;
  const Words finite = reinterpret_cast<Words>(reinterpret_cast<Floats>(shifted) * 0x1p112f);
  const Words special = reinterpret_cast<Words>(shifted >= 0x0F800000) & 0x7F800000;
  to = reinterpret_cast<Floats>(finite | special | (word & 0x8000) << 16);
}

// Some runs, and where their accesses' gradients are in `values`: `place` of each access, and
// kMostAhead more that are prefetched but not read; `factor` of each access, or null for ones.
template <typename T>
struct RunSums {
  const T* values;
  const int64_t* place;
  const float* factor;
  const int32_t* run_start;  // [runs + 1]; place[0] is of access run_start[0]
  int64_t runs;
  int64_t dim;
  float scale;
  float* out;  // [runs, dim]
};

// Columns [column, column + kVectors · lanes) of all runs.
template <int kBytes, int kVectors, bool kFactors, typename T>
OPER_INLINE void sum_columns(const RunSums<T>& sums, int64_t column) {
  constexpr int64_t kLanes = Vector<kBytes>::kLanes;
  constexpr int64_t kRowBytes = kVectors * kLanes * sizeof(T);
  constexpr int64_t kAhead = std::min(kBytesAhead / std::max<int64_t>(kRowBytes, 64), kMostAhead);
  using Floats = typename Vector<kBytes>::Floats;
  // Locals, as the compiler could not know that writing sums leaves the arguments alone.
  const T* const values = sums.values + column;
  const int64_t* place = sums.place;
  const float* factor = sums.factor;
  const int32_t* const run_start = sums.run_start;
  const int64_t runs = sums.runs, dim = sums.dim;
  const float scale = sums.scale;
  float* out = sums.out + column;
  // The next `count` accesses, which are of one run.
  const auto add = [&](int32_t count, Floats(&sum)[kVectors]) __attribute__((always_inline)) {
    for (; count > 0; --count) {
      const auto* const ahead = reinterpret_cast<const char*>(values + place[kAhead]);
      for (int64_t byte = 0; byte < kRowBytes; byte += 64) __builtin_prefetch(ahead + byte);
      const T* const row = values + *place++;
      const float weight = kFactors ? *factor++ : 1.0f;
      for (int v = 0; v < kVectors; ++v) {
        Floats added;
        load<kBytes>(row + v * kLanes, added);
        sum[v] += kFactors ? added * weight : added;
      }
    }
  };
  for (int64_t run = 0; run < runs; ++run, out += dim) {
    Floats sum[kVectors] = {};
    int32_t left = run_start[run + 1] - run_start[run];
    if (left <= kAccessesPerPiece) {
      add(left, sum);
    } else {
      for (; left > 0; left -= kAccessesPerPiece) {
        Floats piece[kVectors] = {};
        add(std::min<int32_t>(left, kAccessesPerPiece), piece);
        for (int v = 0; v < kVectors; ++v) sum[v] += piece[v];
      }
    }
    for (int v = 0; v < kVectors; ++v) {
      sum[v] *= scale;
      std::memcpy(out + v * kLanes, &sum[v], kBytes);
    }
  }
}

// Columns [column, dim) of all runs.
template <int kBytes, bool kFactors, typename T>
OPER_INLINE void sum_columns_from(const RunSums<T>& sums, int64_t column) {
  constexpr int64_t kLanes = Vector<kBytes>::kLanes;
  for (; column + 8 * kLanes <= sums.dim; column += 8 * kLanes)
    sum_columns<kBytes, 8, kFactors>(sums, column);
  if (column + 4 * kLanes <= sums.dim) {
    sum_columns<kBytes, 4, kFactors>(sums, column);
    column += 4 * kLanes;
  }
  if (column + 2 * kLanes <= sums.dim) {
    sum_columns<kBytes, 2, kFactors>(sums, column);
    column += 2 * kLanes;
  }
  for (; column + kLanes <= sums.dim; column += kLanes)
    sum_columns<kBytes, 1, kFactors>(sums, column);
  if constexpr (kBytes > 4) {
    if (column < sums.dim) sum_columns_from<kBytes / 2, kFactors>(sums, column);
  }
}

template <int kBytes, typename T>
OPER_INLINE void sum_runs_body(const RunSums<T>& sums) {
  sums.factor ? sum_columns_from<kBytes, true>(sums, 0) : sum_columns_from<kBytes, false>(sums, 0);
}

#if defined(__x86_64__) && defined(__GNUC__)
template <typename T>
__attribute__((target("avx512f"))) void sum_runs_avx512(const RunSums<T>& sums) {
  sum_runs_body<64>(sums);
}
template <typename T>
__attribute__((target("avx2"))) void sum_runs_avx2(const RunSums<T>& sums) {
  sum_runs_body<32>(sums);
}
#endif

template <typename T>
void sum_runs(const RunSums<T>& sums) {
#if defined(__x86_64__) && defined(__GNUC__)
  static const bool avx512 = __builtin_cpu_supports("avx512f");
  static const bool avx2 = __builtin_cpu_supports("avx2");
  if (avx512) return sum_runs_avx512(sums);
  if (avx2) return sum_runs_avx2(sums);
#endif
  sum_runs_body<16>(sums);
}

}  // namespace oper
