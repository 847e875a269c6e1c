// The arguments that name the replicas of buckets, the same on the processor and on devices,
// checked.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "cpu/common/arguments.h"
#include "oper/allreduce/touched_bitmap.h"

namespace oper {

// Replicas of a bucket: a bitmap of more takes over 2 GiB, and their rows more than any machine
// has.
constexpr int64_t kMostReplicas = int64_t{1} << 34;

// `counts` replicas of each bucket, by their slots; a bucket without slots is numbered by them.
inline std::vector<Replicas> replicas_of(at::TensorList slots, at::IntArrayRef counts) {
  OPER_CHECK_VALUE(slots.size() == counts.size(), "replicas: expected ", counts.size(),
                   " lists, one per bucket, got ", slots.size());
  std::vector<Replicas> buckets;
  for (size_t b = 0; b < counts.size(); ++b) {
    check_size(counts[b], 0, kMostReplicas, "counts");
    const bool numbered_by_slots = slots[b].numel() == 0;
    const int64_t* const slot =
        elements<int64_t>(slots[b], numbered_by_slots ? 0 : counts[b], "replicas");
    buckets.push_back({numbered_by_slots ? nullptr : slot, counts[b]});
  }
  return buckets;
}

// The words of a bitmap of all buckets.
inline int64_t words_of_all(at::IntArrayRef counts) {
  int64_t sum = 0;
  for (const int64_t count : counts) {
    check_size(count, 0, kMostReplicas, "counts");
    sum += words_of(count);
  }
  return sum;
}

// Checks that each bucket has the number of a group; which numbers there are, only some use.
inline void check_one_each(at::IntArrayRef group, size_t buckets) {
  OPER_CHECK_VALUE(group.size() == buckets, "group: expected ", buckets,
                   " numbers, one per bucket, got ", group.size());
}

}  // namespace oper
