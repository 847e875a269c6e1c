// Gradients of the weights of accesses on a device: the product of each access's row and the
// gradient of its bag's sum, in the order of additions of `dot` (step/lookup.h).
//
// That order has sixteen sums, value d in the one of number d mod 16. Threads that hold a row
// together keep kValues of them each, so that no sum is shared; the sixteen are added by halves,
// across threads and then in each. Bags are taken by groups of these threads, kRows accesses of a
// bag at a time, for which the bag's gradient is read once.
#pragma once

#include "oper/cuda/device.h"
#include "oper/cuda/launchers.h"
#include "oper/cuda/read_rows.cuh"
#include "oper/cuda/row_values.cuh"
#include "oper/cuda/tiles.cuh"

namespace oper {

constexpr int kDotSums = 16;

// kValues values of a bag's gradient, `place` the first of them.
template <int kValues>
__device__ __forceinline__ void load_gradient(const WeightArguments& a, int64_t place,
                                              float (&value)[kValues]) {
  if (a.grad_type == kFloat32) {
    const auto piece = load_row<4 * kValues>(a.grad + 4 * place);
#pragma unroll
    for (int k = 0; k < kValues; ++k) value[k] = Values<Float32Row, 4 * kValues>::get(piece, k);
    return;
  }
  const auto piece = load_row<2 * kValues>(a.grad + 2 * place);
#pragma unroll
  for (int k = 0; k < kValues; ++k)
    value[k] = a.grad_type == kFloat16 ? Values<Float16Row, 2 * kValues>::get(piece, k)
                                       : Values<BFloat16Row, 2 * kValues>::get(piece, k);
}

// The sum of the sixteen sums of a row, of which each of its threads holds kValues. All threads of
// the warp come here together.
template <int kValues>
__device__ __forceinline__ float add_by_halves(float (&sum)[kValues]) {
#pragma unroll
  for (int half = kDotSums / 2; half >= kValues; half /= 2)
#pragma unroll
    for (int k = 0; k < kValues; ++k)
      sum[k] += __shfl_xor_sync(0xFFFFFFFFu, sum[k], half / kValues);
#pragma unroll
  for (int half = kValues / 2; half > 0; half /= 2)
#pragma unroll
    for (int k = 0; k < half; ++k) sum[k] += sum[k + half];
  return sum[0];
}

constexpr int kWeightThreads = 256;

// Tiles are of a bag for each group of threads.
template <typename Row, int kValues, int kRows>
__global__ void __launch_bounds__(kWeightThreads, 4)
    weight_gradients(const __grid_constant__ WeightArguments a) {
  constexpr int kBytes = kValues * static_cast<int>(kValueBytes<Row>);
  constexpr int kLanes = kDotSums / kValues, kGroups = kWeightThreads / kLanes;
  if (a.report && a.report->bad_bag != kNothingBad) return;
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  const int group = static_cast<int>(threadIdx.x) / kLanes;
  for_tiles<kGroups>(a, group, [&](const LookupFeature& feature, int64_t i) {
    Bag bag;
    if (i < feature.bags) bag = bag_at(a, feature.first_bag + i);
    const int64_t end = bag.begin + bag.length, place = feature.out_base + i * feature.out_stride;
    const float divisor = feature.mean ? static_cast<float>(bag.length) : 1.0f;
    for (int64_t n = bag.begin; __ballot_sync(0xFFFFFFFFu, n < end); n += kRows) {
      const uint8_t* row[kRows];
      find_rows(a, [&](int u) { return n + u; }, [&](int u) { return n + u < end; }, row);
      Levels<Row, kBytes> levels[kRows];
      float sum[kRows][kValues] = {};
#pragma unroll
      for (int u = 0; u < kRows; ++u)
        if (n + u < end) levels[u].load(row[u], a.dim);
      for (int64_t d = lane * kValues; d < a.dim && n < end; d += kDotSums) {
        Piece<kBytes> piece[kRows];
        float grad[kValues];
#pragma unroll
        for (int u = 0; u < kRows; ++u)
          if (n + u < end) piece[u] = load_row<kBytes>(row[u] + d * kValueBytes<Row>);
        load_gradient(a, place + d, grad);
#pragma unroll
        for (int u = 0; u < kRows; ++u) {
          if (n + u >= end) continue;
#pragma unroll
          for (int k = 0; k < kValues; ++k)
            sum[u][k] += levels[u].value(Values<Row, kBytes>::get(piece[u], k)) * grad[k];
        }
      }
#pragma unroll
      for (int u = 0; u < kRows; ++u) {
        const float product = add_by_halves(sum[u]);
        if (lane == 0 && n + u < end) a.out[n + u] = product / divisor;
      }
    }
  });
}

}  // namespace oper
