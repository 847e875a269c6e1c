// One step of an optimizer on the rows that have a gradient: FBGEMM's fused sparse optimizers,
// which see a row's whole gradient once per step and touch no other row. SGD with momentum and L2
// decay, which FBGEMM has not, are torch.optim.SGD's.
//
// Arithmetic and state are in fp32 for rows of any type; fp16 and bf16 rows are rounded to the
// nearest, or at random (step/stochastic_rounding.h). What a value's step is stands here once, for
// the processor (step/update_rows.h) and for devices (cuda/update_rows.cuh).
#pragma once

#include <array>
#include <cmath>
#include <cstdint>
#include <string>
#include <tuple>

#include "oper/common/simd.h"
#include "oper/common/struct_fields.h"
#include "oper/step/row_formats.h"
#include "oper/step/stochastic_rounding.h"

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
  double
      rounding_step;  // the step's number, where 16-bit rows are rounded at random; 0: they are not

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
        .add("rounding_step", &StepSettings::rounding_step)
        .text();
  }
};

// The settings of a step as the kernels take them.
struct Settings {
  float lr, eps, l2, shrink;
  float beta1, rest1;  // beta1 and 1 - beta1
  float beta2, rest2;
  float step_size, root_scale;
  uint64_t rounding;  // the step's rounding_key; 0: 16-bit rows are rounded to the nearest

  static Settings of(const StepSettings& s) {
    const auto narrow = [](double value) { return static_cast<float>(value); };
    return {narrow(s.lr),
            narrow(s.eps),
            narrow(s.l2),
            narrow(s.shrink),
            narrow(s.beta1),
            narrow(1 - s.beta1),
            narrow(s.beta2),
            narrow(1 - s.beta2),
            narrow(s.step_size),
            narrow(s.root_scale),
            rounding_key(static_cast<uint64_t>(s.rounding_step))};
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
  uint8_t* marks;  // a byte a slot, 1 where the row was updated; null where none are kept
};

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

// The parts that have a value for each of a row's: the first of a row's state. One float32 for the
// row, if it has one, follows them.
template <size_t kParts>
constexpr int value_parts(const std::array<StatePart, kParts>& parts) {
  int count = 0;
  for (const StatePart& part : parts) count += part.rowwise ? 0 : 1;
  return count;
}

// Each optimizer: its name, the parts of a row's state in the order in which they lie there (STATES
// of oper/runtime/tables/optimizers.py), and its step in two functions:
//
//     rate    what all values of a row take: of the settings alone, or, row-wise, of the row's one
//             float32 of state, which it updates, and the mean of the gradient's squares
//     step    a value w of the row, and those of its state, by its gradient g

struct ByValue {
  static constexpr bool kRowwise = false;
  static OPER_HD OPER_INLINE float rate(const Settings& s) { return s.lr; }
};

struct Sgd : ByValue {
  static constexpr const char* kName = "sgd";
  static constexpr std::array<StatePart, 0> kState{};

  static OPER_HD OPER_INLINE void step(float& w, float g, float rate, const Settings&) {
    w -= rate * g;
  }
};

struct MomentumSgd : ByValue {
  static constexpr const char* kName = "momentum_sgd";
  static constexpr std::array<StatePart, 1> kState{{{"momentum1", false}}};

  static OPER_HD OPER_INLINE void step(float& w, float& momentum, float g, float rate,
                                       const Settings& s) {
    momentum = s.beta1 * momentum + g;
    w -= rate * momentum;
  }
};

struct Adagrad : ByValue {
  static constexpr const char* kName = "adagrad";
  static constexpr std::array<StatePart, 1> kState{{{"momentum1", false}}};

  static OPER_HD OPER_INLINE void step(float& w, float& square, float g, float rate,
                                       const Settings& s) {
    square += g * g;
    w -= rate * g / (std::sqrt(square) + s.eps);
  }
};

struct RowwiseAdagrad {
  static constexpr const char* kName = "rowwise_adagrad";
  static constexpr std::array<StatePart, 1> kState{{{"momentum1", true}}};
  static constexpr bool kRowwise = true;

  static OPER_HD OPER_INLINE float rate(float& square, float mean_square, const Settings& s) {
    square += mean_square;
    return s.lr / (std::sqrt(square) + s.eps);
  }

  static OPER_HD OPER_INLINE void step(float& w, float g, float rate, const Settings&) {
    w -= rate * g;
  }
};

struct Adam {
  static constexpr const char* kName = "adam";
  static constexpr std::array<StatePart, 2> kState{{{"momentum1", false}, {"exp_avg_sq", false}}};
  static constexpr bool kRowwise = false;

  static OPER_HD OPER_INLINE float rate(const Settings& s) { return s.step_size; }

  static OPER_HD OPER_INLINE void step(float& w, float& mean, float& square, float g, float rate,
                                       const Settings& s) {
    mean = s.beta1 * mean + s.rest1 * g;
    square = s.beta2 * square + s.rest2 * (g * g);
    w -= rate * mean / (std::sqrt(square) * s.root_scale + s.eps);
  }
};

struct PartialRowwiseAdam {
  static constexpr const char* kName = "partial_rowwise_adam";
  static constexpr std::array<StatePart, 2> kState{{{"momentum1", false}, {"exp_avg_sq", true}}};
  static constexpr bool kRowwise = true;

  static OPER_HD OPER_INLINE float rate(float& square, float mean_square, const Settings& s) {
    square = s.beta2 * square + s.rest2 * mean_square;
    return s.step_size / (std::sqrt(square) * s.root_scale + s.eps);
  }

  static OPER_HD OPER_INLINE void step(float& w, float& mean, float g, float rate,
                                       const Settings& s) {
    mean = s.beta1 * mean + s.rest1 * g;
    w -= rate * mean;
  }
};

using Optimizers = std::tuple<Sgd, MomentumSgd, Adagrad, RowwiseAdagrad, Adam, PartialRowwiseAdam>;

// f(Optimizer{}) of a number.
template <size_t n = 0, typename F>
auto with_optimizer(size_t number, const F& f) {
  if constexpr (n + 1 < std::tuple_size_v<Optimizers>)
    if (number != n) return with_optimizer<n + 1>(number, f);
  return f(std::tuple_element_t<n, Optimizers>{});
}

// An optimizer's step of a value, whose state is state[0], and state[stride] if it has two parts.
template <typename Optimizer>
OPER_HD OPER_INLINE void step_value(float& w, float* state, int64_t stride, float g, float rate,
                                    const Settings& s) {
  constexpr int kParts = value_parts(Optimizer::kState);
  if constexpr (kParts == 0)
    Optimizer::step(w, g, rate, s);
  else if constexpr (kParts == 1)
    Optimizer::step(w, state[0], g, rate, s);
  else
    Optimizer::step(w, state[0], state[stride], g, rate, s);
}

}  // namespace oper
