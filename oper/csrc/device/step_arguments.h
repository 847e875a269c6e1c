// What kernels that take an optimizer's step of rows on a device are given.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

#include "cpu/step/update_arguments.h"
#include "device/arguments.h"
#include "device/library.h"
#include "oper/cuda/launchers.h"

namespace oper {

// Sets the arenas, with the marks of their slots if any are kept, the settings of optimizer number
// `optimizer`, which are `packed` in their place where that is given, and where rows are counted.
inline void set_step(const at::Tensor& rows, const at::Tensor& state, int64_t dim, int64_t dtype,
                     size_t optimizer, at::ArrayRef<double> settings, at::Tensor& updated,
                     const std::optional<at::Tensor>& marks,
                     const std::optional<at::Tensor>& packed, StepArguments& a) {
  a.settings = settings_of(settings);
  if (packed) {
    check_on(*packed, rows, "packed");
    const auto* const words = elements<int64_t>(*packed, "packed");
    OPER_CHECK_VALUE(packed->nbytes() == sizeof(Settings), "packed: expected the ",
                     sizeof(Settings), " bytes of pack_settings, got ", packed->nbytes());
    a.there = reinterpret_cast<const Settings*>(words);
  }
  a.arena = arena_of(rows, state, dim, dtype, optimizer, marks);
  a.slots = rows.size(0);
  check_on(state, rows, "state");
  check_on(updated, rows, "updated");
  a.updated =
      reinterpret_cast<unsigned long long*>(writable_elements<int64_t>(updated, 1, "updated"));
  a.wide_rows =
      dim % 4 == 0 && is_wide(a.arena.rows) && a.arena.row_bytes % bytes_of_row(dtype, 4) == 0;
  a.wide_state = is_wide(a.arena.state) && a.arena.state_bytes % kWideBytes == 0;
}

}  // namespace oper
