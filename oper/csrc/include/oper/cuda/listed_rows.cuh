// Rows and gradients that kernels are given by lists: ascending slots, and the values of each.
#pragma once

#include "oper/cuda/device.h"
#include "oper/cuda/launchers.h"
#include "oper/cuda/search.cuh"

namespace oper {

// The entries of one list.
struct ListedRows {
  const int64_t* slots;
  const float* values;
  int count;
};

__device__ __forceinline__ ListedRows rows_of(const UpdateList& list) {
  const int64_t before = list.before[0];
  return {list.slots + before, list.values + list.first_value[0],
          static_cast<int>(list.before[1] - before)};
}

// The entry of a list that is a slot; -1 where none is.
__device__ __forceinline__ int find_slot(const ListedRows& list, int64_t slot) {
  if (list.count == 0) return -1;
  const auto entry = static_cast<int>(last_at_most(list.slots, 0, list.count, slot));
  return list.slots[entry] == slot ? entry : -1;
}

}  // namespace oper
