// The all-in-one lookup on a device (OPER, USENIX ATC 2024, §5): the rows of the features of one
// shape of rows, wherever they lie, summed bag by bag into one output. As on the processor
// (step/lookup.h), bit by bit: products and sums are rounded apart, rows added in the bag's order.
//
// kLanes threads hold a row together, kBytes of it each, and read kRows rows of a bag before they
// add the first, so that as many reads are on their way. A block's threads work on a tile
// (tiles.cuh), and then on the next. All threads of a row load the same address, which the hardware
// broadcasts: no thread needs to hear of another, and bags of any lengths stand beside each other
// in a warp.
//
// Rows longer than kLanes · kBytes are summed part by part, and the bag's addresses read again.
#pragma once

#include "oper/cuda/device.h"
#include "oper/cuda/launchers.h"
#include "oper/cuda/read_rows.cuh"
#include "oper/cuda/row_values.cuh"
#include "oper/cuda/tiles.cuh"

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

// Where `pool_bags` finds its rows: all of them by pointers, which all ranks' arenas have here. The
// other source, `Gets` (nvshmem/row_gets.cuh), asks other nodes for those that have none.
//
// A source has
//     kGets                        whether rows may have to be brought before they are read
//     kBlocks                      blocks that are to stay on a multiprocessor
//     bring(n, end, is_there)      brings what the accesses from n on need; up to where it is there
//     find(number, there, row)     as find_rows
//     load<kBytes>(place)          a piece of a row
struct Mapped : Unchanged {
  using Arguments = LookupArguments;
  static constexpr bool kGets = false;
  static constexpr int kBlocks = 4;
  const Arguments& a;

  __device__ Mapped(const Arguments& a, int64_t, int, int) : a(a) {}

  template <int kRows, typename Number, typename There>
  __device__ __forceinline__ void find(const Number& number, const There& there,
                                       const uint8_t* (&row)[kRows]) const {
    find_rows(a, number, there, row);
  }
};

// Adds the rows of accesses [n, end) of a bag, from value `first` of each on.
template <typename Row, int kBytes, int kRows, bool kWeighted, typename Source>
__device__ __forceinline__ void add_accesses(const LookupArguments& a, const Source& source,
                                             int64_t n, int64_t end, int64_t first,
                                             float (&sum)[Values<Row, kBytes>::kCount]) {
  using Values = oper::Values<Row, kBytes>;
  for (; n < end; n += kRows) {
    const uint8_t* row[kRows];
    source.find([&](int u) { return n + u; }, [&](int u) { return n + u < end; }, row);
    Piece<kBytes> piece[kRows];
    float weight[kRows];
    Levels<Row, kBytes, Source> levels[kRows];
#pragma unroll
    for (int u = 0; u < kRows; ++u) {
      if (n + u >= end) continue;
      piece[u] = source.template load<kBytes>(row[u] + first * kValueBytes<Row>);
      levels[u].load(row[u], a.dim);
      if (kWeighted) weight[u] = a.weights[n + u];
    }
#pragma unroll
    for (int u = 0; u < kRows; ++u) {
      if (n + u >= end) continue;
#pragma unroll
      for (int k = 0; k < Values::kCount; ++k) {
        const float value = levels[u].value(Values::get(piece[u], k));
        sum[k] += kWeighted ? weight[u] * value : value;
      }
    }
  }
}

constexpr int kLookupThreads = 256;

// Tiles are of a bag for each group of kLanes threads.
template <typename Row, int kBytes, int kLanes, int kRows, bool kWeighted, typename Source>
__global__ void __launch_bounds__(kLookupThreads, Source::kBlocks)
    pool_bags(const __grid_constant__ typename Source::Arguments a) {
  constexpr int kCount = Values<Row, kBytes>::kCount;
  if (a.report && a.report->bad_bag != kNothingBad) return;
  constexpr int kGroups = kLookupThreads / kLanes;
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  const int group = static_cast<int>(threadIdx.x) / kLanes;
  Source source(a, static_cast<int64_t>(blockIdx.x) * kGroups + group, lane, kLanes);
  // Lanes beyond the end of a row help to bring the others' rows.
  const int64_t last = Source::kGets ? a.dim + lane * kCount : a.dim;
  for_tiles<kGroups>(a, group, [&](const LookupFeature& feature, int64_t i) {
    if (i >= feature.bags) return;
    const auto [begin, length] = bag_at(a, feature.first_bag + i);
    const int64_t end = begin + length;
    for (int64_t first = lane * kCount; first < last; first += kLanes * kCount) {
      // -0 leaves any number as it is when it is added to.
      float sum[kCount];
#pragma unroll
      for (int k = 0; k < kCount; ++k) sum[k] = length ? -0.0f : 0.0f;
      if constexpr (Source::kGets) {
        const bool again = first >= kLanes * kCount;
        for (int64_t n = begin, to; n < end; n = to) {
          to = source.bring(n, end, again && n == begin);
          if (first < a.dim)
            add_accesses<Row, kBytes, kRows, kWeighted>(a, source, n, to, first, sum);
        }
        if (first >= a.dim) continue;
      } else {
        add_accesses<Row, kBytes, kRows, kWeighted>(a, source, begin, end, first, sum);
      }
      if (feature.mean && length > 1) divide(sum, length);
      store_values(a, feature.out_base + i * feature.out_stride, first, sum);
    }
  });
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

// Blocks of `pool_short_bags` that a multiprocessor holds at the least: 64 registers a thread.
constexpr int kBlocksOfShortBags = 4;

// Bags of which most have one access or none, without weights: the first rows of kRows bags of a
// group at once. Groups stay for many bags, and look for the rows of the next turn while those of
// this one are on their way: a row's place takes up to three reads, one after another. What is
// rare, bags of more rows, is looked at again rather than kept in registers.
//
// Tiles are of kRows bags for each group. A block takes tiles that follow each other, so that all
// features are read at the same time: rows of a small table, which all its bags read, would keep a
// part of the cache busy while the others wait.
template <typename Row, int kBytes, int kLanes, int kRows>
__global__ void __launch_bounds__(kLookupThreads, kBlocksOfShortBags)
    pool_short_bags(const __grid_constant__ LookupArguments a) {
  using Values = oper::Values<Row, kBytes>;
  constexpr int kCount = Values::kCount, kGroups = kLookupThreads / kLanes;
  if (a.report && a.report->bad_bag != kNothingBad) return;
  // Of 32 bits, which save registers: launches with more bags of a feature take the other kernel.
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  const int group = static_cast<int>(threadIdx.x) / kLanes;
  const int dim = static_cast<int>(a.dim);
  const int of_block = static_cast<int>((tiles_of(a) + gridDim.x - 1) / gridDim.x);
  int tile = static_cast<int>(blockIdx.x) * of_block;
  if (tile >= tiles_of(a)) return;
  const int end = tile + of_block < tiles_of(a) ? tile + of_block : tiles_of(a);
  // The first of a group's bags in a tile of feature f.
  const auto first_bag = [&](int tile, int f) {
    return (tile - a.first_tile[f]) * (kRows * kGroups) + group;
  };
  const uint8_t* next[kRows];  // null: the bag is empty, or there is none
  bool longer = false;         // whether one of the bags has more rows
  const auto look = [&](int tile, int f) {
    go_to_tile(a, tile, f);
    const LookupFeature& feature = a.features[f];
    const int i = first_bag(tile, f), bags = static_cast<int>(feature.bags);
    int64_t begin[kRows];
    longer = false;
#pragma unroll
    for (int u = 0; u < kRows; ++u) {
      Bag bag;
      if (i + u * kGroups < bags) bag = bag_at(a, feature.first_bag + i + u * kGroups);
      begin[u] = bag.length ? bag.begin : -1;
      longer |= bag.length > 1;
    }
    find_rows(a, [&](int u) { return begin[u]; }, [&](int u) { return begin[u] >= 0; }, next);
#pragma unroll
    for (int u = 0; u < kRows; ++u)
      if (begin[u] < 0) next[u] = nullptr;
  };
  int f = 0;
  look(tile, f);
  for (; tile < end; ++tile) {
    const bool any_longer = longer;
    go_to_tile(a, tile, f);
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
      if (first + kLanes * kCount >= dim && tile + 1 < end) look(tile + 1, f);
      const LookupFeature& feature = a.features[f];
      const int i = first_bag(tile, f), bags = static_cast<int>(feature.bags);
#pragma unroll
      for (int u = 0; u < kRows; ++u) {
        if (i + u * kGroups >= bags) continue;
        float sum[kCount];
#pragma unroll
        for (int k = 0; k < kCount; ++k)
          sum[k] = read[u] ? levels[u].value(Values::get(piece[u], k)) : 0.0f;
        if (any_longer) add_others<Row, kBytes>(a, feature, i + u * kGroups, first, sum);
        store_values(a, feature.out_base + (i + u * kGroups) * feature.out_stride, first, sum);
      }
    }
  }
}

}  // namespace oper
