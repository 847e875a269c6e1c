// The buckets of replicas that launches are given, from the arguments of operators.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "cpu/allreduce/replica_arguments.h"
#include "cpu/common/arguments.h"
#include "oper/cuda/launchers.h"

namespace oper {

// The least of kMostReplicaBuckets and what is left of `all` buckets from the first on.
inline int64_t buckets_from(int64_t first, size_t all) {
  return std::min<int64_t>(kMostReplicaBuckets, static_cast<int64_t>(all) - first);
}

// The buckets of a launch, and the words of a bitmap before each.
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

// f(first, word) for the first bucket of each launch, and the words of a bitmap before it.
template <typename F>
void each_launch(const std::vector<Replicas>& all, const F& f) {
  int64_t word = 0;
  for (int64_t first = 0; first < static_cast<int64_t>(all.size()); first += kMostReplicaBuckets) {
    f(first, word);
    for (int64_t b = 0; b < buckets_from(first, all.size()); ++b)
      word += words_of(all[first + b].count);
  }
}

// The groups of rows, [2, groups + 1] on a device.
inline const int64_t* lines_of(const at::Tensor& groups, const char* name) {
  OPER_CHECK_VALUE(groups.dim() == 2 && groups.size(0) == 2 && groups.size(1) > 0, name,
                   ": expected [2, groups + 1], got ", groups.sizes());
  return elements<int64_t>(groups, name);
}

// The groups of rows, a bucket each.
inline const int64_t* lines_of(const at::Tensor& groups, size_t buckets, const char* name) {
  const int64_t* const lines = lines_of(groups, name);
  OPER_CHECK_VALUE(groups.size(1) == static_cast<int64_t>(buckets) + 1, name, ": expected ",
                   buckets, " groups, one per bucket, got ", groups.size(1) - 1);
  return lines;
}

inline void* stream_of(int64_t stream) { return reinterpret_cast<void*>(stream); }

}  // namespace oper
