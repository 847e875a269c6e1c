// One step of an optimizer on the rows that have a gradient: FBGEMM's fused sparse optimizers,
// which see a row's whole gradient once per step and touch no other row. SGD with momentum and L2
// decay, which FBGEMM has not, are torch.optim.SGD's.
//
// Arithmetic and state are in fp32 for rows of any type; fp16 and bf16 rows are rounded to the
// nearest. Sums over a row's values are made in an order that does not depend on the vectors'
// width, so that ranks on unlike machines agree to the last bit.
#pragma once

#include <array>
#include <cmath>
#include <cstdint>
#include <string>
#include <tuple>
#include <vector>

#include "oper/common/simd.h"
#include "oper/common/struct_fields.h"
#include "oper/step/merge_gradients.h"
#include "oper/step/row_formats.h"

namespace oper {

// The settings of a step as Python gives them: StepSettings of oper/runtime/tables/optimizers.py.
struct StepSettings {
  double lr;
  double eps;
  double l2;      // weight decay as a part of the gradient
  double shrink;  // what decoupled weight decay multiplies a row by: 1 - lr·decay
  double beta1;   // momentum, for SGD
  double beta2;
  double step_size;   // lr / (1 - beta1^step)
  double root_scale;  // 1 / √(1 - beta2^step)

  static std::string fields() {
    return Fields<StepSettings>()
        .add("lr", &StepSettings::lr)
        .add("eps", &StepSettings::eps)
        .add("l2", &StepSettings::l2)
        .add("shrink", &StepSettings::shrink)
        .add("beta1", &StepSettings::beta1)
        .add("beta2", &StepSettings::beta2)
        .add("step_size", &StepSettings::step_size)
        .add("root_scale", &StepSettings::root_scale)
        .text();
  }
};

// The settings of a step as the kernels take them.
struct Settings {
  float lr, eps, l2, shrink;
  float beta1, rest1;  // beta1 and 1 - beta1
  float beta2, rest2;
  float step_size, root_scale;

  static Settings of(const StepSettings& s) {
    const auto narrow = [](double value) { return static_cast<float>(value); };
    return {narrow(s.lr),        narrow(s.eps),       narrow(s.l2),    narrow(s.shrink),
            narrow(s.beta1),     narrow(1 - s.beta1), narrow(s.beta2), narrow(1 - s.beta2),
            narrow(s.step_size), narrow(s.root_scale)};
  }
};

// The arenas of one width on one rank.
struct Arena {
  uint8_t* rows;
  int64_t row_bytes;
  uint8_t* state;
  int64_t state_bytes;
  int64_t dim;
  RowType type;
};

// The mean of the squares: sixteen sums, then by halves.
OPER_INLINE float mean_square(const float* values, int64_t dim) {
  float sums[16] = {};
  int64_t d = 0;
  for (; d + 16 <= dim; d += 16)
    for (int64_t k = 0; k < 16; ++k) sums[k] += values[d + k] * values[d + k];
  for (int64_t k = 0; d + k < dim; ++k) sums[k] += values[d + k] * values[d + k];
  for (int64_t half = 8; half > 0; half /= 2)
    for (int64_t k = 0; k < half; ++k) sums[k] += sums[k + half];
  return sums[0] / static_cast<float>(dim);
}

// A part of a row's state: a float32 for each of the row's values, or one for the row.
struct StatePart {
  const char* name;
  bool rowwise;
};

// The float32 values of a row's state.
template <size_t kParts>
constexpr int64_t values_of_state(const std::array<StatePart, kParts>& parts, int64_t dim) {
  int64_t values = 0;
  for (const StatePart& part : parts) values += part.rowwise ? 1 : dim;
  return values;
}

// Each optimizer: its name, the parts of a row's state in the order in which they lie there (STATES
// of oper/runtime/tables/optimizers.py), and its step on row w with gradient g.

struct Sgd {
  static constexpr const char* kName = "sgd";
  static constexpr std::array<StatePart, 0> kState{};

  OPER_INLINE static void step(float* __restrict__ w, float*, const float* __restrict__ g,
                               int64_t dim, const Settings& s) {
    for (int64_t d = 0; d < dim; ++d) w[d] -= s.lr * g[d];
  }
};

struct MomentumSgd {
  static constexpr const char* kName = "momentum_sgd";
  static constexpr std::array<StatePart, 1> kState{{{"momentum1", false}}};

  OPER_INLINE static void step(float* __restrict__ w, float* __restrict__ momentum,
                               const float* __restrict__ g, int64_t dim, const Settings& s) {
    for (int64_t d = 0; d < dim; ++d) {
      momentum[d] = s.beta1 * momentum[d] + g[d];
      w[d] -= s.lr * momentum[d];
    }
  }
};

struct Adagrad {
  static constexpr const char* kName = "adagrad";
  static constexpr std::array<StatePart, 1> kState{{{"momentum1", false}}};

  OPER_INLINE static void step(float* __restrict__ w, float* __restrict__ squares,
                               const float* __restrict__ g, int64_t dim, const Settings& s) {
    for (int64_t d = 0; d < dim; ++d) {
      squares[d] += g[d] * g[d];
      w[d] -= s.lr * g[d] / (std::sqrt(squares[d]) + s.eps);
    }
  }
};

struct RowwiseAdagrad {
  static constexpr const char* kName = "rowwise_adagrad";
  static constexpr std::array<StatePart, 1> kState{{{"momentum1", true}}};

  OPER_INLINE static void step(float* __restrict__ w, float* __restrict__ squares,
                               const float* __restrict__ g, int64_t dim, const Settings& s) {
    *squares += mean_square(g, dim);
    const float rate = s.lr / (std::sqrt(*squares) + s.eps);
    for (int64_t d = 0; d < dim; ++d) w[d] -= rate * g[d];
  }
};

struct Adam {
  static constexpr const char* kName = "adam";
  static constexpr std::array<StatePart, 2> kState{{{"momentum1", false}, {"exp_avg_sq", false}}};

  OPER_INLINE static void step(float* __restrict__ w, float* __restrict__ state,
                               const float* __restrict__ g, int64_t dim, const Settings& s) {
    float* __restrict__ const mean = state;
    float* __restrict__ const squares = state + dim;
    for (int64_t d = 0; d < dim; ++d) {
      mean[d] = s.beta1 * mean[d] + s.rest1 * g[d];
      squares[d] = s.beta2 * squares[d] + s.rest2 * (g[d] * g[d]);
      w[d] -= s.step_size * mean[d] / (std::sqrt(squares[d]) * s.root_scale + s.eps);
    }
  }
};

struct PartialRowwiseAdam {
  static constexpr const char* kName = "partial_rowwise_adam";
  static constexpr std::array<StatePart, 2> kState{{{"momentum1", false}, {"exp_avg_sq", true}}};

  OPER_INLINE static void step(float* __restrict__ w, float* __restrict__ state,
                               const float* __restrict__ g, int64_t dim, const Settings& s) {
    float* __restrict__ const mean = state;
    float& square = state[dim];
    square = s.beta2 * square + s.rest2 * mean_square(g, dim);
    const float rate = s.step_size / (std::sqrt(square) * s.root_scale + s.eps);
    for (int64_t d = 0; d < dim; ++d) {
      mean[d] = s.beta1 * mean[d] + s.rest1 * g[d];
      w[d] -= rate * mean[d];
    }
  }
};

using Optimizers = std::tuple<Sgd, MomentumSgd, Adagrad, RowwiseAdagrad, Adam, PartialRowwiseAdam>;

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

// Put what `widen` gave back into the row.
OPER_INLINE void narrow(const float* __restrict__ values, RowType type, int64_t dim, uint8_t* row) {
  if (type == kFloat32) return;
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
    Optimizer::step(w, reinterpret_cast<float*>(arena.state + slot * arena.state_bytes), gradient,
                    dim, s);
    narrow(w, arena.type, dim, row);
  };
  return merge(lists, dim, ahead, sum, prefetch, update);
}

}  // namespace oper
