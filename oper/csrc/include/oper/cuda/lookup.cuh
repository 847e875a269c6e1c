// The all-in-one lookup on a device (OPER, USENIX ATC 2024, §5): the rows of the features of one
// shape of rows, wherever they lie, summed bag by bag into one output. As on the processor
// (step/lookup.h), bit by bit: products and sums are rounded apart, rows added in the bag's order.
//
// kLanes threads hold a row together, kBytes of it each, and read kRows rows of a bag before they
// add the first, so that as many reads are on their way. A block's threads work on bags of one
// feature, blockIdx.y. All threads of a row load the same address, which the hardware broadcasts:
// no thread needs to hear of another, and bags of any lengths stand beside each other in a warp.
//
// Rows longer than kLanes · kBytes are summed part by part, and the bag's addresses read again.
#pragma once

#include "oper/cuda/device.h"
#include "oper/cuda/launchers.h"
#include "oper/cuda/read_rows.cuh"
#include "oper/cuda/row_values.cuh"

namespace oper {

// kCount values of a bag's sum, from value `first` on, to its `place` in the output.
template <int kCount>
__device__ __forceinline__ void store_values(const LookupArguments& a, int64_t place, int64_t first,
                                             const float (&value)[kCount]) {
  if (a.out_type == kFloat32) {
    float* const out = reinterpret_cast<float*>(a.out) + place + first;
    if constexpr (kCount % 4 == 0) {
      if (a.wide_stores) {
#pragma unroll
        for (int n = 0; n < kCount; n += 4)
          store_streamed(out + n, {bits_of_float(value[n]), bits_of_float(value[n + 1]),
                                   bits_of_float(value[n + 2]), bits_of_float(value[n + 3])});
        return;
      }
    }
#pragma unroll
    for (int n = 0; n < kCount; ++n) out[n] = value[n];
    return;
  }
  uint16_t* const out = reinterpret_cast<uint16_t*>(a.out) + place + first;
#pragma unroll
  for (int n = 0; n < kCount; ++n)
    out[n] = a.out_type == kFloat16 ? half_of_float(value[n]) : bfloat_of_float(value[n]);
}

template <int kCount>
__device__ __forceinline__ void divide(float (&sum)[kCount], int64_t length) {
  const float divisor = static_cast<float>(length);
#pragma unroll
  for (int k = 0; k < kCount; ++k) sum[k] /= divisor;
}

template <typename Row, int kBytes, int kLanes, int kRows, bool kWeighted>
__global__ void __launch_bounds__(256, 4) pool_bags(const __grid_constant__ LookupArguments a) {
  using Piece = oper::Piece<kBytes>;
  using Values = oper::Values<Row, kBytes>;
  constexpr int kCount = Values::kCount;
  if (a.report && a.report->bad_bag != kNothingBad) return;
  const LookupFeature& feature = a.features[blockIdx.y];
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  const int64_t groups = static_cast<int64_t>(gridDim.x) * blockDim.x / kLanes;
  const int64_t mine = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) / kLanes;
  for (int64_t i = mine; i < feature.bags; i += groups) {
    const auto [begin, length] = bag_at(a, feature.first_bag + i);
    const int64_t end = begin + length;
    for (int64_t first = lane * kCount; first < a.dim; first += kLanes * kCount) {
      // -0 leaves any number as it is when it is added to.
      float sum[kCount];
#pragma unroll
      for (int k = 0; k < kCount; ++k) sum[k] = length ? -0.0f : 0.0f;
      for (int64_t n = begin; n < end; n += kRows) {
        const uint8_t* row[kRows];
        find_rows(a, [&](int u) { return n + u; }, [&](int u) { return n + u < end; }, row);
        Piece piece[kRows];
        float weight[kRows];
        Levels<Row, kBytes> levels[kRows];
#pragma unroll
        for (int u = 0; u < kRows; ++u) {
          if (n + u >= end) continue;
          piece[u] = load_row<kBytes>(row[u] + first * kValueBytes<Row>);
          levels[u].load(row[u], a.dim);
          if (kWeighted) weight[u] = a.weights[n + u];
        }
#pragma unroll
        for (int u = 0; u < kRows; ++u) {
          if (n + u >= end) continue;
#pragma unroll
          for (int k = 0; k < kCount; ++k) {
            const float value = levels[u].value(Values::get(piece[u], k));
            sum[k] += kWeighted ? weight[u] * value : value;
          }
        }
      }
      if (feature.mean && length > 1) divide(sum, length);
      store_values(a, feature.out_base + i * feature.out_stride, first, sum);
    }
  }
}

// Adds the rows of a feature's bag i but the first, and divides where means are asked for.
template <typename Row, int kBytes, int kCount>
__device__ __forceinline__ void add_others(const LookupArguments& a, const LookupFeature& feature,
                                           int64_t i, int64_t first, float (&sum)[kCount]) {
  const auto [begin, length] = bag_at(a, feature.first_bag + i);
  for (int64_t n = begin + 1; n < begin + length; ++n) {
    const uint8_t* row[1];
    find_rows(a, [&](int) { return n; }, [](int) { return true; }, row);
    const Piece<kBytes> piece = load_row<kBytes>(row[0] + first * kValueBytes<Row>);
    Levels<Row, kBytes> levels;
    levels.load(row[0], a.dim);
#pragma unroll
    for (int k = 0; k < kCount; ++k) sum[k] += levels.value(Values<Row, kBytes>::get(piece, k));
  }
  if (feature.mean && length > 1) divide(sum, length);
}

// Blocks of `pool_short_bags` that a multiprocessor holds: 64 registers a thread.
constexpr int kBlocksOfShortBags = 4;

// Bags of which most have one access or none, without weights: the first rows of kRows bags of a
// group at once. Groups stay for many bags, and look for the rows of the next turn while those of
// this one are on their way: a row's place takes up to three reads, one after another. What is
// rare, bags of more rows, is looked at again rather than kept in registers.
template <typename Row, int kBytes, int kLanes, int kRows>
__global__ void __launch_bounds__(256, kBlocksOfShortBags)
    pool_short_bags(const __grid_constant__ LookupArguments a) {
  using Values = oper::Values<Row, kBytes>;
  constexpr int kCount = Values::kCount;
  if (a.report && a.report->bad_bag != kNothingBad) return;
  const LookupFeature& feature = a.features[blockIdx.y];
  // Of 32 bits, which save registers: launches with more bags of a feature take the other kernel.
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  const int groups = static_cast<int>(gridDim.x * blockDim.x / kLanes);
  const int bags = static_cast<int>(feature.bags), dim = static_cast<int>(a.dim);
  const uint8_t* next[kRows];  // null: the bag is empty, or there is none
  bool longer = false;         // whether one of the bags has more rows
  const auto look = [&](int i) {
    int64_t begin[kRows];
    longer = false;
#pragma unroll
    for (int u = 0; u < kRows; ++u) {
      Bag bag;
      if (i + u * groups < bags) bag = bag_at(a, feature.first_bag + i + u * groups);
      begin[u] = bag.length ? bag.begin : -1;
      longer |= bag.length > 1;
    }
    find_rows(a, [&](int u) { return begin[u]; }, [&](int u) { return begin[u] >= 0; }, next);
#pragma unroll
    for (int u = 0; u < kRows; ++u)
      if (begin[u] < 0) next[u] = nullptr;
  };
  int i = static_cast<int>((blockIdx.x * blockDim.x + threadIdx.x) / kLanes);
  look(i);
  for (; i < bags; i += kRows * groups) {
    const bool any_longer = longer;
    for (int first = lane * kCount; first < dim; first += kLanes * kCount) {
      oper::Piece<kBytes> piece[kRows];
      Levels<Row, kBytes> levels[kRows];
      bool read[kRows];
#pragma unroll
      for (int u = 0; u < kRows; ++u) {
        read[u] = next[u] != nullptr;
        if (!read[u]) continue;
        piece[u] = load_row<kBytes>(next[u] + first * kValueBytes<Row>);
        levels[u].load(next[u], a.dim);
      }
      if (first + kLanes * kCount >= dim) look(i + kRows * groups);
#pragma unroll
      for (int u = 0; u < kRows; ++u) {
        if (i + u * groups >= bags) continue;
        float sum[kCount];
#pragma unroll
        for (int k = 0; k < kCount; ++k)
          sum[k] = read[u] ? levels[u].value(Values::get(piece[u], k)) : 0.0f;
        if (any_longer) add_others<Row, kBytes>(a, feature, i + u * groups, first, sum);
        store_values(a, feature.out_base + (i + u * groups) * feature.out_stride, first, sum);
      }
    }
  }
}

}  // namespace oper
