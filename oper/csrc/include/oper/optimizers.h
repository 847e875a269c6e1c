// One step of an optimizer on the rows that have gradients: FBGEMM's fused sparse optimizers, which
// see a row's whole gradient once per step and touch no other row.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "oper/merge.h"

namespace oper {

// In the order of Optimizer.settings in oper/runtime/optimizers.py.
struct Settings {
  float lr;
  float eps;
  float weight_decay;
};

// The arenas of one width on one rank.
struct Arena {
  uint8_t* rows;
  int64_t row_bytes;
  uint8_t* state;
  int64_t state_bytes;
  int64_t dim;
};

struct Sgd {
  static void update(float* row, float*, const float* gradient, int64_t dim, const Settings& s) {
    for (int64_t d = 0; d < dim; ++d)
      row[d] -= s.lr * (gradient[d] + s.weight_decay * row[d]);
  }
};

// Merge `lists` and update each of their rows once; returns the number of rows.
template <typename Optimizer>
int64_t update_rows(const std::vector<Gradients>& lists, const Arena& arena,
                    const Settings& settings) {
  std::vector<float> sum(arena.dim);
  const auto prefetch = [&](int64_t slot) {
    const uint8_t* const row = arena.rows + slot * arena.row_bytes;
    for (int64_t byte = 0; byte < arena.row_bytes; byte += 64) __builtin_prefetch(row + byte, 1);
  };
  return merge(lists, arena.dim, 8, sum.data(), prefetch, [&](int64_t slot, const float* gradient) {
    Optimizer::update(reinterpret_cast<float*>(arena.rows + slot * arena.row_bytes),
                      reinterpret_cast<float*>(arena.state + slot * arena.state_bytes), gradient,
                      arena.dim, settings);
  });
}

}  // namespace oper
