// The update of rows on the processor: the gradients of all ranks merged, and one step of an
// optimizer (step/optimizers.h) with each row.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "oper/common/simd.h"
#include "oper/step/dot.h"
#include "oper/step/merge_gradients.h"
#include "oper/step/optimizers.h"
#include "oper/step/row_formats.h"

namespace oper {

OPER_INLINE float mean_square(const float* values, int64_t dim) {
  return dot(values, values, dim) / static_cast<float>(dim);
}

// An optimizer's step with row w and its state, by its gradient g.
template <typename Optimizer>
OPER_INLINE void step_row(float* __restrict__ w, float* __restrict__ state,
                          const float* __restrict__ g, int64_t dim, const Settings& s) {
  float rate;
  if constexpr (Optimizer::kRowwise)
    rate = Optimizer::rate(state[value_parts(Optimizer::kState) * dim], mean_square(g, dim), s);
  else
    rate = Optimizer::rate(s);
  for (int64_t d = 0; d < dim; ++d) step_value<Optimizer>(w[d], state + d, dim, g[d], rate, s);
}

// A row's values in fp32: the row itself, or a copy of it in `copy` [dim].
OPER_INLINE float* widen(uint8_t* row, RowType type, int64_t dim, float* __restrict__ copy) {
  if (type == kFloat32) return reinterpret_cast<float*>(row);
  const uint16_t* const halves = reinterpret_cast<const uint16_t*>(row);
  if (type == kFloat16)
    for (int64_t d = 0; d < dim; ++d) copy[d] = float_of_half(halves[d]);
  else
    for (int64_t d = 0; d < dim; ++d) copy[d] = float_of_bfloat(halves[d]);
  return copy;
}

// Put what `widen` gave back into the row, rounded at random: a function of its own, compiled by
// itself for several processors, as it makes the loops of the others slower where it stands in
// them.
void narrow_at_random(const float* values, RowType type, int64_t dim, RowBits random, uint8_t* row);

// Put what `widen` gave back into the row of a slot.
OPER_INLINE void narrow(const float* __restrict__ values, RowType type, int64_t dim,
                        const Settings& s, int64_t slot, uint8_t* row) {
  if (type == kFloat32) return;
  if (s.rounding != 0) return narrow_at_random(values, type, dim, RowBits(s.rounding, slot), row);
  uint16_t* const halves = reinterpret_cast<uint16_t*>(row);
  if (type == kFloat16)
    for (int64_t d = 0; d < dim; ++d) halves[d] = half_of_float(values[d]);
  else
    for (int64_t d = 0; d < dim; ++d) halves[d] = bfloat_of_float(values[d]);
}

// Ask for the lines of memory that hold these bytes, to be written to.
OPER_INLINE void prefetch_bytes(const uint8_t* first, int64_t bytes) {
  for (int64_t byte = 0; byte < bytes; byte += 64) __builtin_prefetch(first + byte, 1);
  __builtin_prefetch(first + bytes - 1, 1);
}

// Merge `lists` and update each of their rows once; returns the number of rows.
template <typename Optimizer>
OPER_INLINE int64_t update_rows(const std::vector<Gradients>& lists, const Arena& arena,
                                const Settings& s) {
  constexpr int64_t kBytesAhead = 4 << 10;  // as fast as more, and it fits the smallest cache
  const int64_t dim = arena.dim;
  const int64_t state_bytes =
      values_of_state(Optimizer::kState, dim) * static_cast<int64_t>(sizeof(float));
  const int64_t fetched = static_cast<int64_t>(lists.size()) * (arena.row_bytes + state_bytes);
  const int64_t ahead = std::min<int64_t>(std::max<int64_t>(kBytesAhead / (fetched + 1), 2), 32);
  std::vector<float> buffer(2 * dim);
  float* const sum = buffer.data();
  float* const copy = sum + dim;
  const auto prefetch = [&](int64_t slot) __attribute__((always_inline)) {
    prefetch_bytes(arena.rows + slot * arena.row_bytes, arena.row_bytes);
    if (state_bytes > 0) prefetch_bytes(arena.state + slot * arena.state_bytes, state_bytes);
    if (arena.marks != nullptr) __builtin_prefetch(arena.marks + slot, 1);
  };
  const auto update = [&](int64_t slot, const float* gradient) __attribute__((always_inline)) {
    uint8_t* const row = arena.rows + slot * arena.row_bytes;
    float* const w = widen(row, arena.type, dim, copy);
    if (s.l2 != 0) {
      for (int64_t d = 0; d < dim; ++d) sum[d] = gradient[d] + s.l2 * w[d];
      gradient = sum;
    }
    if (s.shrink != 1)
      for (int64_t d = 0; d < dim; ++d) w[d] *= s.shrink;
    step_row<Optimizer>(w, reinterpret_cast<float*>(arena.state + slot * arena.state_bytes),
                        gradient, dim, s);
    narrow(w, arena.type, dim, s, slot, row);
    if (arena.marks != nullptr) arena.marks[slot] = 1;
  };
  return merge(lists, dim, ahead, sum, prefetch, update);
}

}  // namespace oper
