// Arguments of the operators on replicas, as launches take them: buckets, and groups of rows.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "cpu/allreduce/replica_arguments.h"
#include "cpu/common/arguments.h"
#include "cpu/step/row_groups.h"
#include "oper/cuda/launchers.h"

namespace oper {

// The buckets of a launch that begins with the bucket `first` of `all`.
inline int64_t buckets_from(int64_t first, size_t all) {
  return std::min<int64_t>(kMostReplicaBuckets, static_cast<int64_t>(all) - first);
}

// Sets the buckets of a launch, and the words of a bitmap before each.
inline void set_buckets(ReplicaBuckets& a, const std::vector<Replicas>& all, int64_t first,
                        int64_t first_word) {
  a.buckets = buckets_from(first, all.size());
  a.first_word[0] = first_word;
  for (int64_t b = 0; b < a.buckets; ++b) {
    a.slots[b] = all[first + b].slots;
    a.count[b] = all[first + b].count;
    a.first_word[b + 1] = a.first_word[b] + words_of(a.count[b]);
  }
}

// Calls f(first, word) for each launch with its first bucket, and the words of a bitmap before it.
template <typename F>
void each_launch(const std::vector<Replicas>& all, const F& f) {
  int64_t word = 0;
  for (int64_t first = 0; first < static_cast<int64_t>(all.size()); first += kMostReplicaBuckets) {
    f(first, word);
    for (int64_t b = 0; b < buckets_from(first, all.size()); ++b)
      word += words_of(all[first + b].count);
  }
}

// The groups of rows on a device, [2, groups + 1].
inline const int64_t* lines_of(const at::Tensor& groups, const char* name) {
  count_groups(groups, name);
  return elements<int64_t>(groups, name);
}

// The groups of rows on a device, one per bucket.
inline const int64_t* lines_of(const at::Tensor& groups, size_t buckets, const char* name) {
  const int64_t count = count_groups(groups, name);
  OPER_CHECK_VALUE(count == static_cast<int64_t>(buckets), name, ": expected ", buckets,
                   " groups, one per bucket, got ", count);
  return elements<int64_t>(groups, name);
}

inline void* stream_of(int64_t stream) { return reinterpret_cast<void*>(stream); }

}  // namespace oper
