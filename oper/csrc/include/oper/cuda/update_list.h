// Lists of rows' gradients, as kernels are given them.
#pragma once

#include <cstdint>

namespace oper {

constexpr int kMostLists = 72;  // of an update: they are parameters, of 4 KB at most

// Gradients of ascending slots, a row's values one after another: a group of those of a batch.
struct UpdateList {
  const int64_t* slots;        // of all groups
  const float* values;         // of all groups
  const int64_t* before;       // [2] rows of `slots` before the group, and with it
  const int64_t* first_value;  // [1] values of `values` before the group
};

}  // namespace oper
