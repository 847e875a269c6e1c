// The room of workers for samples, as operators get it.
#pragma once

#include <cstdint>
#include <vector>

#include "cpu/common/arguments.h"

namespace oper {

constexpr int64_t kMostAssigned = int64_t{1} << 22;  // samples of a batch

// `room` [M] as numbers; ValueError where the workers have none for all samples.
inline std::vector<int64_t> checked_room(const at::Tensor& room, int64_t workers, int64_t samples) {
  const int64_t* const most = elements<int64_t>(room, workers, "room");
  int64_t sum = 0;
  for (int64_t w = 0; w < workers; ++w) {
    check_size(most[w], 0, kMostAssigned, "room");
    sum += most[w];
  }
  OPER_CHECK_VALUE(sum >= samples, "room: for ", sum, " samples, and there are ", samples);
  return {most, most + workers};
}

}  // namespace oper
