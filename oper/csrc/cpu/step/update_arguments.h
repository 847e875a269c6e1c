// The arguments of update_rows that are the same on the processor and on devices, checked.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstring>
#include <optional>
#include <tuple>

#include "cpu/common/arguments.h"
#include "oper/step/optimizers.h"

namespace oper {

// The number of an optimizer in Optimizers, by its name.
template <size_t n = 0>
size_t number_of(c10::string_view name) {
  if constexpr (n == std::tuple_size_v<Optimizers>) {
    OPER_CHECK_VALUE(false, "optimizer: ", name, " is not known");
  } else {
    return name == std::tuple_element_t<n, Optimizers>::kName ? n : number_of<n + 1>(name);
  }
}

// The settings of a step, which come as StepSettings.
inline Settings settings_of(at::ArrayRef<double> values) {
  constexpr size_t kSize = sizeof(StepSettings) / sizeof(double);
  OPER_CHECK_VALUE(values.size() == kSize, "settings: expected ", kSize, " values, got ",
                   values.size());
  StepSettings given;
  std::memcpy(&given, values.data(), sizeof(given));
  OPER_CHECK_VALUE(given.rounding_step >= 0 && given.rounding_step <= 0x1p53,
                   "settings: rounding_step ", given.rounding_step, " is no number of a step");
  return Settings::of(given);
}

// The marks of an arena's slots, if any are kept.
inline uint8_t* marks_of(const std::optional<at::Tensor>& marks, const at::Tensor& rows) {
  if (!marks) return nullptr;
  OPER_CHECK_TYPE(marks->scalar_type() == at::kBool && marks->is_contiguous() &&
                      marks->device() == rows.device(),
                  "marks: expected a contiguous bool tensor on ", rows.device(), ", got ",
                  marks->scalar_type(), " on ", marks->device());
  OPER_CHECK_VALUE(marks->dim() == 1 && marks->numel() == rows.size(0), "marks: expected ",
                   rows.size(0), ", one per slot, got ", marks->sizes());
  return static_cast<uint8_t*>(marks->data_ptr());
}

// The arenas of a width, whose slots have room for rows of `dim` values and an optimizer's state.
inline Arena arena_of(const at::Tensor& rows, const at::Tensor& state, int64_t dim, int64_t dtype,
                      size_t optimizer, const std::optional<at::Tensor>& marks) {
  check_size(dim, 1, kMostThings, "dim");
  OPER_CHECK_VALUE(dtype == kFloat32 || dtype == kFloat16 || dtype == kBFloat16,
                   "dtype: expected 0 (float32), 1 (float16) or 2 (bfloat16), got ", dtype);
  for (const at::Tensor& part : {rows, state})
    OPER_CHECK_TYPE(part.scalar_type() == at::kByte && part.dim() == 2 && part.is_contiguous(),
                    "rows, state: expected contiguous uint8 [slots, bytes], got ",
                    part.scalar_type(), " ", part.sizes());
  OPER_CHECK_VALUE(rows.size(0) == state.size(0),
                   "rows, state: expected equal numbers of slots, got ", rows.size(0), " and ",
                   state.size(0));
  const Arena arena{static_cast<uint8_t*>(rows.data_ptr()),
                    rows.size(1),
                    static_cast<uint8_t*>(state.data_ptr()),
                    state.size(1),
                    dim,
                    static_cast<RowType>(dtype),
                    marks_of(marks, rows)};
  OPER_CHECK_VALUE(dim > 0 && bytes_of_row(dtype, dim) <= arena.row_bytes,
                   "rows: ", arena.row_bytes, " bytes a slot are too few for ", dim, " values");
  with_optimizer(optimizer, [&](auto of) {
    const int64_t state_bytes =
        values_of_state(decltype(of)::kState, dim) * static_cast<int64_t>(sizeof(float));
    OPER_CHECK_VALUE(state_bytes <= arena.state_bytes, "state: ", arena.state_bytes,
                     " bytes a slot, and ", decltype(of)::kName, " needs ", state_bytes);
  });
  const int64_t value_bytes = bytes_of_row(dtype, 1);
  OPER_CHECK_VALUE(arena.row_bytes % value_bytes == 0 && arena.state_bytes % 4 == 0,
                   "rows, state: values must not straddle slots");
  return arena;
}

}  // namespace oper
