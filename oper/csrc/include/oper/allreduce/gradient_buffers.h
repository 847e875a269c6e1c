// Gradients of the replicas in buffers of equal shape on all ranks (OPER, §5.3): one row for each
// slot of the union, of those who have none as well, so that buffers can be added as they are.
//
// The padding is -0.0, which leaves any number as it was when it is added, +0.0 and -0.0 included:
// a sum over padded buffers is, bit by bit, the sum over the ranks that have the row. A row that is
// there begins with another value than -0.0, as +0.0 is added to its first: where no bitmap tells
// which rows were touched (the dense method), they can be told from the padding.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

namespace oper {

constexpr float kPadding = -0.0f;

// One rank's gradients: ascending slots, and `dim` values for each.
template <typename Slot>
struct SlotRows {
  const Slot* slot;
  const float* row;
  int64_t size;
};

// out[j - begin] = the sum over the lists that have slot_of(j), in their order, or padding, for the
// rows j in [begin, end) of the union, in which slots ascend. Returns how many rows were found.
template <typename Slot, typename SlotOf>
int64_t aggregate(const std::vector<SlotRows<Slot>>& lists, const SlotOf& slot_of, int64_t begin,
                  int64_t end, int64_t dim, float* out) {
  if (begin == end) return 0;
  std::vector<int64_t> at(lists.size());
  for (size_t l = 0; l < lists.size(); ++l) {
    const Slot* const slot = lists[l].slot;
    at[l] = std::lower_bound(slot, slot + lists[l].size, static_cast<Slot>(slot_of(begin))) - slot;
  }
  int64_t found = 0;
  for (int64_t j = begin; j < end; ++j, out += dim) {
    const int64_t slot = slot_of(j);
    bool touched = false;
    for (size_t l = 0; l < lists.size(); ++l) {
      const SlotRows<Slot>& list = lists[l];
      if (at[l] == list.size || list.slot[at[l]] != slot) continue;
      const float* const row = list.row + at[l]++ * dim;
      ++found;
      if (touched) {
        for (int64_t d = 0; d < dim; ++d) out[d] += row[d];
      } else {
        std::memcpy(out, row, dim * sizeof(float));
        out[0] += 0.0f;
        touched = true;
      }
    }
    if (!touched) std::fill(out, out + dim, kPadding);
  }
  return found;
}

// Whether a row of a sum of buffers is padding in all of them.
inline bool is_padding(const float* row, int64_t dim) {
  constexpr uint32_t kBits = 0x80000000u;  // of -0.0
  for (int64_t d = 0; d < dim; ++d) {
    uint32_t bits;
    std::memcpy(&bits, row + d, sizeof(bits));
    if (bits != kBits) return false;
  }
  return true;
}

// out = the sum of buffers of equal size, in their order.
inline void sum_buffers(const std::vector<const float*>& parts, int64_t size, float* out) {
  constexpr int64_t kBlock = 2048;  // what is summed so far stays in the first cache
  for (int64_t begin = 0; begin < size; begin += kBlock) {
    const int64_t end = std::min(begin + kBlock, size);
    std::memcpy(out + begin, parts[0] + begin, (end - begin) * sizeof(float));
    for (size_t p = 1; p < parts.size(); ++p) {
      const float* const part = parts[p];
      for (int64_t i = begin; i < end; ++i) out[i] += part[i];
    }
  }
}

}  // namespace oper
