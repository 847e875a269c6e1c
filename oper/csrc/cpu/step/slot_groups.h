// Groups of slots, as ranks list them for each other: those of one bucket and owner.
#pragma once

#include <cstdint>
#include <tuple>

#include "cpu/common/arguments.h"
#include "oper/plan/address.h"

namespace oper {

// Group g is slots[before[g] : before[g + 1]]. What `before` says lies in the host's memory, the
// slots may lie on a device.
struct SlotGroups {
  const int64_t* slots;
  const int64_t* before;
  int64_t count, most;

  SlotGroups(const at::Tensor& slots, const at::Tensor& before, const char* name)
      : slots(elements<int64_t>(slots, name)),
        before(elements_at_least<int64_t>(before, 1, name)),
        count(before.numel() - 1),
        most(slots.numel()) {
    OPER_CHECK_VALUE(before.is_cpu(), "before: must be on the host");
  }

  // Where a group begins and ends.
  std::tuple<int64_t, int64_t> range(int64_t group, const char* name) const {
    check_index(group, count, name, "groups");
    const int64_t begin = before[group], end = before[group + 1];
    OPER_CHECK_VALUE(0 <= begin && begin <= end && end <= most, name, ": group ", group,
                     " is slots ", begin, " to ", end, " of ", most);
    return {begin, end};
  }
};

// A group of a rank's rows, and the united slots that these are among.
struct UnitedGroup {
  int64_t group;
  const int64_t* slots;
  int64_t size;
  int64_t field, first;  // what the first slot is called: a slot of a field of addresses
};

// f of each of `groups`: the i-th is among the i-th group of all lists, list after list.
template <typename F>
void for_united_groups(at::IntArrayRef groups, at::TensorList united, at::TensorList united_before,
                       at::IntArrayRef fields, at::IntArrayRef firsts, const F& f) {
  OPER_CHECK_VALUE(groups.size() == fields.size() && groups.size() == firsts.size(),
                   "groups, fields, firsts: expected equal numbers of them, got ", groups.size(),
                   ", ", fields.size(), " and ", firsts.size());
  OPER_CHECK_VALUE(united.size() == united_before.size(),
                   "united, united_before: expected equal numbers of them, got ", united.size(),
                   " and ", united_before.size());
  size_t i = 0;
  for (size_t n = 0; n < united.size(); ++n) {
    const SlotGroups all(united[n], united_before[n], "united");
    OPER_CHECK_VALUE(static_cast<int64_t>(groups.size() - i) >= all.count,
                     "groups: ", groups.size(), ", and more are united");
    for (int64_t g = 0; g < all.count; ++g, ++i) {
      const auto [begin, end] = all.range(g, "united_before");
      check_size(fields[i], 0, kReplica - 1, "fields");
      check_size(firsts[i], 0, kMostRows - (end - begin), "firsts");
      f({groups[i], all.slots + begin, end - begin, fields[i], firsts[i]});
    }
  }
  OPER_CHECK_VALUE(i == groups.size(), "groups: ", groups.size(), ", and ", i, " are united");
}

}  // namespace oper
