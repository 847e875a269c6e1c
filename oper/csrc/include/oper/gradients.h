// Gradients of a batch summed by row: for every run of accesses of one row,
//
//     out[run] = scale · sum over the run's accesses n, in order, of factor[n] · grad[bag of n]
//
// Gradients lie in no order, so a task first finds where its accesses' gradients are, and then
// sums while those of a few accesses later are on their way. A sum is held in registers: columns
// are taken 8 vectors, then 4, 2 and 1 at a time, the rest by narrower vectors.
//
// A run longer than a piece is summed piece by piece, counted from its own start, and then piece
// after piece: its sum depends on nothing but its own accesses, whoever computes it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

namespace oper {

constexpr int64_t kAccessesPerPiece = 1024;
constexpr int64_t kGradientsAhead = 12;

// A gradient's value in 16 bits; the rest is in the conversions below.
struct Half {
  uint16_t bits;
};
struct BFloat {
  uint16_t bits;
};

// Where the gradients of a bucket's accesses lie, by position.
struct GradientPlaces {
  struct Segment {
    int64_t end;     // of the feature's accesses
    int64_t origin;  // bag b's gradient is at origin + b · stride
    int64_t stride;
    bool mean;
  };

  std::vector<Segment> segments;          // of all features
  std::vector<int32_t> segment_of_block;  // of the first of each 2^block_bits accesses
  int block_bits = 0;
  const int32_t* bag_of = nullptr;     // by position; null where every access is a bag
  const int32_t* offsets32 = nullptr;  // of bags; one of the two where there is bag_of
  const int64_t* offsets64 = nullptr;

  // `segments` are set. About a thousand blocks: few of them hold the end of a segment.
  void make_blocks() {
    const int64_t accesses = segments.empty() ? 0 : segments.back().end;
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

// Pointers to the gradients of `size` accesses, and what each is multiplied by: its weight (none:
// 1), divided by the length of its bag for means. `factor` is null where that is 1 for all.
template <typename T>
void find_gradients(const GradientPlaces& places, const T* grad, const float* weights,
                    const int32_t* positions, int64_t size, const T** source, float* factor) {
  if (!places.bag_of) {
    for (int64_t n = 0; n < size; ++n) {
      const auto& segment = places.segment_of(positions[n]);
      source[n] = grad + segment.origin + positions[n] * segment.stride;
    }
  } else {
    for (int64_t n = 0; n < size; ++n) {
      const auto& segment = places.segment_of(positions[n]);
      source[n] = grad + segment.origin + places.bag_of[positions[n]] * segment.stride;
    }
  }
  if (!factor) return;
  for (int64_t n = 0; n < size; ++n) {
    const float weight = weights ? weights[positions[n]] : 1.0f;
    const bool divided = places.bag_of && places.segment_of(positions[n]).mean;
    factor[n] =
        divided ? weight / static_cast<float>(places.length(places.bag_of[positions[n]])) : weight;
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
inline __attribute__((always_inline)) void load(const float* from,
                                                typename Vector<kBytes>::Floats& to) {
  std::memcpy(&to, from, kBytes);
}

template <int kBytes>
inline __attribute__((always_inline)) void load(const BFloat* from,
                                                typename Vector<kBytes>::Floats& to) {
  typename Vector<kBytes>::Shorts shorts;
  std::memcpy(&shorts, from, sizeof(shorts));
  to = reinterpret_cast<typename Vector<kBytes>::Floats>(
      __builtin_convertvector(shorts, typename Vector<kBytes>::Words) << 16);
}

// An fp16 with its exponent in fp32's place is too small by 2^112, subnormal or not.
template <int kBytes>
inline __attribute__((always_inline)) void load(const Half* from,
                                                typename Vector<kBytes>::Floats& to) {
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

// Some runs, and where their accesses' gradients are: `source` of each access, and kGradientsAhead
// more that may be fetched in vain; `factor` of each access, or null for ones.
template <typename T>
struct RunSums {
  const T* const* source;
  const float* factor;
  const int32_t* run_start;  // [runs + 1]; source[0] is of access run_start[0]
  int64_t runs;
  int64_t dim;
  float scale;
  float* out;  // [runs, dim]
};

// Columns [column, column + kVectors · lanes) of all runs.
template <int kBytes, int kVectors, bool kFactors, typename T>
inline __attribute__((always_inline)) void sum_columns(const RunSums<T>& sums, int64_t column) {
  constexpr int kLanes = Vector<kBytes>::kLanes;
  using Floats = typename Vector<kBytes>::Floats;
  // Locals, as the compiler could not know that writing sums leaves the arguments alone.
  const T* const* source = sums.source;
  const float* factor = sums.factor;
  const int32_t* const run_start = sums.run_start;
  const int64_t runs = sums.runs, dim = sums.dim;
  const float scale = sums.scale;
  float* out = sums.out + column;
  for (int64_t run = 0; run < runs; ++run, out += dim) {
    Floats sum[kVectors] = {};
    for (int32_t left = run_start[run + 1] - run_start[run]; left > 0; --left) {
      const T* const ahead = source[kGradientsAhead] + column;
      for (int byte = 0; byte < kVectors * kLanes * static_cast<int>(sizeof(T)); byte += 64)
        __builtin_prefetch(reinterpret_cast<const char*>(ahead) + byte);
      const T* const row = *source++ + column;
      const float weight = kFactors ? *factor++ : 1.0f;
      for (int v = 0; v < kVectors; ++v) {
        Floats values;
        load<kBytes>(row + v * kLanes, values);
        sum[v] += kFactors ? values * weight : values;
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
inline __attribute__((always_inline)) void sum_columns_from(const RunSums<T>& sums,
                                                            int64_t column) {
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
inline __attribute__((always_inline)) void sum_runs_body(const RunSums<T>& sums) {
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
