// torch.ops.oper.unite_slots and find_united on a device: slots are there, and how many of them
// each group has is in the host's memory. How many are united is known to the device alone.

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <limits>
#include <tuple>
#include <vector>

#include "cpu/common/arguments.h"
#include "cpu/step/slot_groups.h"
#include "device/arguments.h"
#include "device/library.h"
#include "device/sort.h"
#include "oper/plan/address.h"
#include "schemas.h"

namespace oper {
namespace {

int64_t address_of(const int64_t* place) { return reinterpret_cast<int64_t>(place); }

// The distinct slots of each of `groups` in any of the lists, ascending, one group after the other,
// with room for as many as all lists have, and on the device how many there are before each group.
std::tuple<at::Tensor, at::Tensor> unite_slots(at::TensorList slots, at::TensorList before,
                                               at::IntArrayRef groups, int64_t stream) {
  OPER_CHECK_VALUE(!slots.empty() && slots.size() == before.size(),
                   "slots, before: expected equal numbers of them, at least one, got ",
                   slots.size(), " and ", before.size());
  const c10::DeviceGuard guard(slots[0].device());
  const auto number = static_cast<int64_t>(groups.size());
  check_size(number, 0, kMostThings - 1, "groups");
  std::vector<int64_t> begins, places, of_group;
  int64_t total = 0;
  for (size_t n = 0; n < slots.size(); ++n) {
    check_on(slots[n], slots[0], "slots");
    const SlotGroups of(slots[n], before[n], "slots");
    for (int64_t g = 0; g < number; ++g) {
      const auto [begin, end] = of.range(groups[g], "before");
      if (begin == end) continue;
      begins.push_back(total);
      places.push_back(address_of(of.slots + begin));
      of_group.push_back(g);
      total += end - begin;
    }
  }
  check_size(total, 0, std::numeric_limits<int32_t>::max() - 1, "slots: of all lists");
  const auto words = slots[0].options();
  if (total == 0) return {at::empty({0}, words), at::zeros({number + 1}, words)};
  begins.push_back(total);
  const auto pieces = static_cast<int64_t>(places.size());
  const at::Tensor listed = brought({begins, places, of_group}, words, stream);
  const auto* const there = listed.const_data_ptr<int64_t>();
  const WordLayout layout{number, kSlotBits, 0};
  auto* const on = reinterpret_cast<void*>(stream);
  WordSort sort(total, layout, /*beside=*/false, words);
  const ListedArguments a{there,  there + pieces + 1, there + 2 * pieces + 1, pieces, total,
                          layout, sort.words()};
  check_device(device_library().list_words(&a, on), "uniting slots could not be started");
  sort.run(on);
  return {sort.run_slot(), sort.before()};
}

// What the rows of groups[i] are called, all of which are among the i-th of all lists' united
// groups, list after list: slot firsts[i] of fields[i] and on, in the united order.
void find_united(at::Tensor& targets, const at::Tensor& slots, const at::Tensor& before,
                 at::IntArrayRef groups, at::TensorList united, at::TensorList united_before,
                 at::IntArrayRef fields, at::IntArrayRef firsts, int64_t stream) {
  const c10::DeviceGuard guard(slots.device());
  const SlotGroups own(slots, before, "slots");
  check_on(targets, slots, "targets");
  FoundArguments a{};
  a.targets = writable_elements<int64_t>(targets, 0, "targets");
  a.slots = own.slots;
  std::vector<int64_t> begins, first_row, places, counts, first_target;
  for_united_groups(groups, united, united_before, fields, firsts, [&](const UnitedGroup& of) {
    const auto [begin, end] = own.range(of.group, "before");
    if (begin == end) return;
    OPER_CHECK_VALUE(end <= targets.numel(), "targets: ", targets.numel(), " for rows to ", end);
    OPER_CHECK_VALUE(of.size > 0, "united: group ", of.group, " has no slots");
    begins.push_back(a.rows);
    first_row.push_back(begin);
    places.push_back(address_of(of.slots));
    counts.push_back(of.size);
    first_target.push_back(make_address(of.field, of.first));
    a.rows += end - begin;
  });
  for (const at::Tensor& of : united) check_on(of, slots, "united");
  if (a.rows == 0) return;
  begins.push_back(a.rows);
  a.pieces = static_cast<int64_t>(places.size());
  const at::Tensor listed =
      brought({begins, first_row, places, counts, first_target}, slots.options(), stream);
  a.begins = listed.const_data_ptr<int64_t>();
  a.first_row = a.begins + a.pieces + 1;
  a.places = a.first_row + a.pieces;
  a.counts = a.places + a.pieces;
  a.first_target = a.counts + a.pieces;
  check_device(device_library().find_united(&a, reinterpret_cast<void*>(stream)),
               "finding united rows could not be started");
}

}  // namespace
}  // namespace oper

TORCH_LIBRARY_IMPL(oper, CUDA, m) {
  m.impl("unite_slots", oper::unite_slots);
  m.impl("find_united", oper::find_united);
}

// For tests, of memory that the emulator takes for a device's.
TORCH_LIBRARY_FRAGMENT(oper_emulated, m) {
  m.def(oper::schemas::kUniteSlots);
  m.def(oper::schemas::kFindUnited);
}
TORCH_LIBRARY_IMPL(oper_emulated, CPU, m) {
  m.impl("unite_slots", oper::unite_slots);
  m.impl("find_united", oper::find_united);
}
