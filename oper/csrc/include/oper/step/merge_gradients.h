// The W-way merge by which an owner sums the gradients of its rows (OPER, §5): every rank sends a
// list of distinct slots, ascending, with one gradient each.
//
// A row's slot is known long before its turn, in every list: its memory is prefetched then, as rows
// lie at random and each would be a cache miss.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "oper/common/simd.h"

namespace oper {

// Entries [begin, end) of one rank's list.
struct Gradients {
  const int64_t* slot;
  const float* values;  // the gradient of slot[0], `dim` values; the others follow
  int64_t begin;
  int64_t end;

  int64_t size() const { return end - begin; }
};

// Slots that cut the lists, of which there is one at least, into `pieces` parts of about equal
// size: part n takes the slots [bounds[n], bounds[n + 1]). What a row becomes does not depend on
// the cuts.
inline std::vector<int64_t> cut_slots(const std::vector<Gradients>& lists, int64_t pieces) {
  const auto longest = std::max_element(
      lists.begin(), lists.end(), [](const auto& a, const auto& b) { return a.size() < b.size(); });
  std::vector<int64_t> bounds{0};
  for (int64_t n = 1; n < pieces; ++n)
    bounds.push_back(longest->slot[longest->begin + longest->size() * n / pieces]);
  bounds.push_back(INT64_MAX);
  return bounds;
}

// The parts of all lists with slots in [first, last), in the lists' order; empty ones are left out.
inline std::vector<Gradients> part_of(const std::vector<Gradients>& lists, int64_t first,
                                      int64_t last) {
  std::vector<Gradients> parts;
  for (Gradients list : lists) {
    const int64_t* const end = list.slot + list.end;
    const int64_t* const from = std::lower_bound(list.slot + list.begin, end, first);
    list.begin = from - list.slot;
    list.end = std::lower_bound(from, end, last) - list.slot;
    if (list.size() > 0) parts.push_back(list);
  }
  return parts;
}

// f(slot, gradient) for every distinct slot, ascending. The gradient is the sum over the lists, in
// their order; it lies in a list, or in `sum` [dim]. `prefetch(slot)` is called `ahead` entries of
// its list before a slot is reached. Returns the number of distinct slots.
template <typename Prefetch, typename F>
OPER_INLINE int64_t merge(std::vector<Gradients> lists, int64_t dim, int64_t ahead, float* sum,
                          const Prefetch& prefetch, const F& f) {
  for (const Gradients& list : lists)
    for (int64_t n = list.begin; n < std::min(list.begin + ahead, list.end); ++n)
      prefetch(list.slot[n]);
  int64_t distinct = 0;
  while (!lists.empty()) {
    int64_t slot = INT64_MAX;
    for (const Gradients& list : lists) slot = std::min(slot, list.slot[list.begin]);
    const float* gradient = nullptr;
    bool ended = false;
    for (Gradients& list : lists) {
      if (list.slot[list.begin] != slot) continue;
      const float* const values = list.values + list.begin * dim;
      if (!gradient) {
        gradient = values;
      } else if (gradient != sum) {
        for (int64_t d = 0; d < dim; ++d) sum[d] = gradient[d] + values[d];
        gradient = sum;
      } else {
        for (int64_t d = 0; d < dim; ++d) sum[d] += values[d];
      }
      if (list.begin + ahead < list.end) prefetch(list.slot[list.begin + ahead]);
      ended |= ++list.begin == list.end;
    }
    f(slot, gradient);
    ++distinct;
    if (ended) {
      const auto empty = [](const Gradients& list) { return list.size() == 0; };
      lists.erase(std::remove_if(lists.begin(), lists.end(), empty), lists.end());
    }
  }
  return distinct;
}

}  // namespace oper
