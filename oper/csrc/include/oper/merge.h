// The W-way merge by which an owner gathers the gradients of its rows (OPER, §5): every rank hands
// in a list of distinct slots, ascending, with one gradient each.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace oper {

// The part [begin, end) of one rank's list that is still to be merged.
struct Gradients {
  const int64_t* slot;
  const float* row;  // the gradient of slot[0], `dim` values; the others follow
  int64_t begin;
  int64_t end;
};

// Slots that cut the lists into `pieces` parts of about equal size: part n takes the slots
// [bounds[n], bounds[n + 1]). What a row becomes does not depend on the cuts.
inline std::vector<int64_t> cut_slots(const std::vector<Gradients>& lists, int64_t pieces) {
  const auto size = [](const Gradients& list) { return list.end - list.begin; };
  const auto longest =
      std::max_element(lists.begin(), lists.end(),
                       [&](const auto& a, const auto& b) { return size(a) < size(b); });
  std::vector<int64_t> bounds{0};
  for (int64_t n = 1; n < pieces; ++n)
    bounds.push_back(longest->slot[longest->begin + size(*longest) * n / pieces]);
  bounds.push_back(INT64_MAX);
  return bounds;
}

// The parts of all lists with slots in [first, last); lists that have none are left out, the
// others stay in order.
inline std::vector<Gradients> part_of(const std::vector<Gradients>& lists, int64_t first,
                                      int64_t last) {
  std::vector<Gradients> parts;
  for (Gradients list : lists) {
    const int64_t* const end = list.slot + list.end;
    const int64_t* const from = std::lower_bound(list.slot + list.begin, end, first);
    list.begin = from - list.slot;
    list.end = std::lower_bound(from, end, last) - list.slot;
    if (list.begin < list.end) parts.push_back(list);
  }
  return parts;
}

// f(slot, gradient) for every distinct slot, ascending; the gradient is the sum over the lists, in
// their order, and may lie in `sum` [dim]. `prefetch(slot)` is called `ahead` entries of a list
// before its slot is due. Returns the number of distinct slots.
template <typename Prefetch, typename F>
inline __attribute__((always_inline)) int64_t merge(std::vector<Gradients> lists, int64_t dim,
                                                    int64_t ahead, float* sum,
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
      const float* const row = list.row + list.begin * dim;
      if (!gradient) {
        gradient = row;
      } else {
        for (int64_t d = 0; d < dim; ++d) sum[d] = gradient[d] + row[d];
        gradient = sum;
      }
      if (list.begin + ahead < list.end) prefetch(list.slot[list.begin + ahead]);
      ended |= ++list.begin == list.end;
    }
    f(slot, gradient);
    ++distinct;
    if (ended) {
      const auto done = [](const Gradients& list) { return list.begin == list.end; };
      lists.erase(std::remove_if(lists.begin(), lists.end(), done), lists.end());
    }
  }
  return distinct;
}

}  // namespace oper
