// Which rows the ranks of a node need of other nodes together, and where one of them has these, on
// a device: the words by which lists of slots are united, once they are sorted (sort.cuh), and the
// places of a rank's rows among what is united. The CPU's are in cpu/step/relay.cpp.
#pragma once

#include "oper/cuda/device.h"
#include "oper/cuda/launchers.h"
#include "oper/cuda/search.cuh"

namespace oper {

// A word of each slot of all pieces, one piece after the other.
__global__ void __launch_bounds__(256) list_words(const __grid_constant__ ListedArguments a) {
  const int64_t n = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (n >= a.slots) return;
  const int64_t piece = last_at_most(a.begins, 0, a.pieces, n);
  const auto* const slots = reinterpret_cast<const int64_t*>(a.places[piece]);
  a.words[n] = a.layout.word(a.groups[piece], slots[n - a.begins[piece]], 0);
}

// What each row of all pieces is called where it was fetched to: a thread a row, whose slot is
// looked for among those that were united.
__global__ void __launch_bounds__(256) find_united(const __grid_constant__ FoundArguments a) {
  const int64_t n = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (n >= a.rows) return;
  const int64_t piece = last_at_most(a.begins, 0, a.pieces, n);
  const int64_t row = a.first_row[piece] + n - a.begins[piece], slot = a.slots[row];
  const auto* const united = reinterpret_cast<const int64_t*>(a.places[piece]);
  a.targets[row] = a.first_target[piece] + last_at_most(united, 0, a.counts[piece], slot);
}

}  // namespace oper
