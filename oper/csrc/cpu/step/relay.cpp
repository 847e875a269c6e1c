// torch.ops.oper.unite_slots, find_united and relay_gradients: what a rank does for all ranks of
// its node where rows of other nodes, and their gradients, cross the network once.

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <algorithm>
#include <tuple>
#include <vector>

#include "cpu/common/arguments.h"
#include "cpu/step/row_groups.h"
#include "cpu/step/slot_groups.h"
#include "oper/common/simd.h"
#include "oper/plan/address.h"
#include "oper/step/merge_gradients.h"
#include "schemas.h"

namespace oper {
namespace {

constexpr int64_t kWordBytes = sizeof(int64_t);

// The distinct slots of each of `groups` in any of the lists, ascending, one group after the other.
std::tuple<at::Tensor, at::Tensor> unite_slots(at::TensorList slots, at::TensorList before,
                                               at::IntArrayRef groups, int64_t) {
  OPER_CHECK_VALUE(slots.size() == before.size(),
                   "slots, before: expected equal numbers of them, got ", slots.size(), " and ",
                   before.size());
  const auto number = static_cast<int64_t>(groups.size());
  std::vector<std::vector<Gradients>> lists(number);
  int64_t most = 0;
  for (size_t n = 0; n < slots.size(); ++n) {
    const SlotGroups of(slots[n], before[n], "slots");
    for (int64_t g = 0; g < number; ++g) {
      const auto [begin, end] = of.range(groups[g], "before");
      if (begin < end) lists[g].push_back({of.slots + begin, nullptr, 0, end - begin});
      most += end - begin;
    }
  }
  at::Tensor united = at::empty({most}, at::kLong), ends = at::zeros({number + 1}, at::kLong);
  auto* const slot = united.mutable_data_ptr<int64_t>();
  auto* const end = ends.mutable_data_ptr<int64_t>();
  const auto nothing = [](int64_t) {};
  for (int64_t g = 0; g < number; ++g) {
    int64_t* next = slot + end[g];
    const auto keep = [&](int64_t of, const float*) { *next++ = of; };
    end[g + 1] = end[g] + merge(lists[g], 0, 0, nullptr, nothing, keep);
  }
  return {united.narrow(0, 0, end[number]), ends};
}

// Where rows that came for several ranks lie: `targets` of the rows of groups[i], all of which are
// of the i-th of all lists' united groups, list after list, become slot firsts[i] of fields[i] and
// on, in the united order.
void find_united(at::Tensor& targets, const at::Tensor& slots, const at::Tensor& before,
                 at::IntArrayRef groups, at::TensorList united, at::TensorList united_before,
                 at::IntArrayRef fields, at::IntArrayRef firsts, int64_t) {
  const SlotGroups own(slots, before, "slots");
  int64_t* const to = writable_elements<int64_t>(targets, slots.numel(), "targets");
  for_united_groups(groups, united, united_before, fields, firsts, [&](const UnitedGroup& of) {
    const auto [first, last] = own.range(of.group, "before");
    int64_t at = 0;
    for (int64_t row = first; row < last; ++row, ++at) {
      while (at < of.size && of.slots[at] < own.slots[row]) ++at;
      OPER_CHECK_VALUE(at < of.size && of.slots[at] == own.slots[row], "united: slot ",
                       own.slots[row], " of group ", of.group, " is not there");
      to[row] = make_address(of.field, of.first + at);
    }
  });
}

OPER_SIMD void merge_to(const std::vector<Gradients>& lists, int64_t dim, float* sum,
                        int64_t* slots, float* values) {
  const auto nothing = [](int64_t) {};
  int64_t* slot = slots;
  float* value = values;
  const auto keep = [&](int64_t of, const float* gradient) {
    *slot++ = of;
    value = std::copy_n(gradient, dim, value);
  };
  merge(lists, dim, 0, sum, nothing, keep);
}

// The gradients of some groups, summed over the lists in their order, as messages: groups
// [n·B, (n + 1)·B) of `chosen`, of B buckets of those dims, are message n. In a message the slots
// of all its groups come first and then their gradients, to the end of a word of 8 bytes. Returns
// the rows of each group, and the messages one after the other.
std::tuple<at::Tensor, at::Tensor> relay_gradients(at::TensorList slots, at::TensorList values,
                                                   at::TensorList groups, at::IntArrayRef chosen,
                                                   at::IntArrayRef dims) {
  OPER_CHECK_VALUE(slots.size() == values.size() && slots.size() == groups.size(),
                   "slots, values, groups: expected equal numbers of them, got ", slots.size(),
                   ", ", values.size(), " and ", groups.size());
  const auto number = static_cast<int64_t>(chosen.size());
  const auto buckets = static_cast<int64_t>(dims.size());
  OPER_CHECK_VALUE(buckets == 0 ? number == 0 : number % buckets == 0, "dims: ", buckets,
                   " buckets, and ", number, " groups");
  for (const int64_t dim : dims) check_size(dim, 1, kMostRows, "dims");
  std::vector<std::vector<Gradients>> lists(number);
  for (size_t n = 0; n < slots.size(); ++n)
    for (int64_t g = 0; g < number; ++g) {
      const RowGroup of = row_group(groups[n], chosen[g], chosen[g] + 1, dims[g % buckets],
                                    slots[n].numel(), values[n].numel());
      if (of.rows() > 0)
        lists[g].push_back({elements<int64_t>(slots[n], "slots") + of.begin,
                            elements<float>(values[n], "values") + of.value, 0, of.rows()});
    }
  at::Tensor counted = at::empty({number}, at::kLong);
  auto* const count = counted.mutable_data_ptr<int64_t>();
  at::parallel_for(0, number, 1, [&](int64_t first, int64_t last) {
    const auto nothing = [](int64_t) {};
    for (int64_t g = first; g < last; ++g)
      count[g] = lists[g].size() == 1
                     ? lists[g][0].size()
                     : merge(lists[g], 0, 0, nullptr, nothing, [](int64_t, const float*) {});
  });
  // Where the slots and the gradients of each group begin, in bytes.
  std::vector<int64_t> slots_at(number), values_at(number);
  int64_t bytes = 0;
  for (int64_t message = 0; message < number; message += buckets) {
    for (int64_t g = message; g < message + buckets; ++g) {
      slots_at[g] = bytes;
      bytes += kWordBytes * count[g];
    }
    for (int64_t g = message; g < message + buckets; ++g) {
      values_at[g] = bytes;
      bytes += static_cast<int64_t>(sizeof(float)) * product(count[g], dims[g - message], "dims");
    }
    bytes = (bytes + kWordBytes - 1) / kWordBytes * kWordBytes;
  }
  at::Tensor messages = at::empty({bytes}, at::kByte);
  auto* const out = messages.mutable_data_ptr<uint8_t>();
  at::parallel_for(0, number, 1, [&](int64_t first, int64_t last) {
    for (int64_t g = first; g < last; ++g) {
      if (lists[g].empty()) continue;
      const int64_t dim = dims[g % buckets];
      std::vector<float> sum(dim);
      merge_to(lists[g], dim, sum.data(), reinterpret_cast<int64_t*>(out + slots_at[g]),
               reinterpret_cast<float*>(out + values_at[g]));
    }
  });
  return {counted, messages};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(oper, m) {
  m.def(oper::schemas::kUniteSlots);
  m.def(oper::schemas::kFindUnited);
  m.def(
      "relay_gradients(Tensor[] slots, Tensor[] values, Tensor[] groups, int[] chosen, int[] dims)"
      " -> (Tensor rows, Tensor messages)");
}

TORCH_LIBRARY_IMPL(oper, CPU, m) {
  m.impl("unite_slots", unite_slots);
  m.impl("find_united", find_united);
  m.impl("relay_gradients", relay_gradients);
}

}  // namespace oper
