// torch.ops.oper.sort_accesses on a device. Features are in host memory; what there is to sort is
// the device's, and so is what comes of it, the number of runs included: tensors are as large as
// the batch may need, and the host waits for nothing.

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <algorithm>
#include <limits>
#include <optional>
#include <tuple>

#include "cpu/common/arguments.h"
#include "cpu/step/batch_arguments.h"
#include "device/arguments.h"
#include "device/library.h"
#include "device/sort.h"
#include "oper/common/bits.h"
#include "oper/step/feature.h"
#include "schemas.h"

namespace oper {
namespace {

// Positions, run_start, run_slot and the runs before each group.
using Runs = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

// The fields of words, for accesses that are called by one of `numbers` numbers.
WordLayout layout_of(at::IntArrayRef bucket_slots, int64_t ranks, int64_t numbers) {
  int64_t most = 1;
  for (const int64_t slots : bucket_slots) {
    check_size(slots, 0, kMostRows, "bucket_slots");
    most = std::max(most, slots);
  }
  WordLayout layout{};
  layout.groups = static_cast<int64_t>(bucket_slots.size()) * (1 + ranks);
  layout.slot_bits = bits_for(most);
  OPER_CHECK_VALUE(layout.key_bits() <= 64, "bucket_slots: up to ", most, " in ", layout.groups,
                   " groups are more rows than 64 bits tell apart");
  const int number_bits = bits_for(numbers);
  if (layout.key_bits() + number_bits <= 64) layout.number_bits = number_bits;
  return layout;
}

// Makes words of all accesses, which `a` describes but for the features.
void make_words(WordArguments& a, const Feature* features, int64_t number, int64_t buckets,
                void* stream) {
  const int64_t* const begins = a.segment_offset;
  for (int64_t first = 0; first < number; first += kMostSortedFeatures) {
    a.features = std::min<int64_t>(kMostSortedFeatures, number - first);
    a.segment_offset = begins + first;
    for (int64_t f = 0; f < a.features; ++f) {
      const Feature& feature = features[first + f];
      if (feature.has_gradient) check_index(feature.bucket, buckets, "features", "buckets");
      a.bucket[f] = feature.has_gradient ? static_cast<int32_t>(feature.bucket) : -1;
    }
    const int64_t mean = (a.accesses * a.features + number - 1) / number;
    check_device(device_library().make_words(&a, mean, stream), "the sort could not be started");
  }
}

// `addresses`, segments, offsets and the report are the device's. Of the outputs, what lies beyond
// the runs is anything, and so are positions beyond the last run's.
Runs sort_accesses(const at::Tensor& addresses, const at::Tensor& segment_offset,
                   const at::Tensor& features, int64_t rank, int64_t ranks,
                   at::IntArrayRef bucket_slots, const std::optional<at::Tensor>& offsets,
                   int64_t stream, const std::optional<at::Tensor>& report, bool bad_ids_too) {
  const c10::DeviceGuard guard(addresses.device());
  const auto buckets = static_cast<int64_t>(bucket_slots.size());
  check_size(ranks, 1, kMostThings, "ranks");
  check_size(rank, 0, ranks - 1, "rank");
  check_size(buckets, 0, kMostThings / ranks, "buckets");
  const auto* const described = structs<Feature>(features, "features");
  const int64_t number = features.size(0), accesses = addresses.numel();
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();  // of what positions count
  check_size(accesses, 0, number > 0 ? kMost : 0, "addresses");
  WordArguments a{};
  a.addresses = elements<int64_t>(addresses, "addresses");
  a.accesses = accesses;
  if (offsets) {
    check_on(*offsets, addresses, "offsets");
    a.bags = offsets->numel() - 1;
    check_size(a.bags, accesses > 0, kMost, "offsets: bags");
    set_offsets(*offsets, a);
  }
  if (report) check_on(*report, addresses, "report");
  a.report = report_of(report);
  a.bad_ids_too = bad_ids_too;
  a.rank = rank;
  a.ranks = ranks;
  a.layout = layout_of(bucket_slots, ranks, offsets ? a.bags : accesses);
  // Not waited for, where they come from the host: torch would wait for all that was started.
  const at::Tensor segments = segment_offset.to(addresses.options(), /*non_blocking=*/true);
  a.segment_offset = elements<int64_t>(segments, number + 1, "segment_offset");

  const auto words = addresses.options(), numbers = words.dtype(at::kInt);
  if (accesses == 0)
    return {at::empty({0}, numbers), at::zeros({1}, numbers), at::empty({0}, words),
            at::zeros({a.layout.groups + 1}, words)};
  const bool beside = a.layout.number_bits == 0 && bits_for(offsets ? a.bags : accesses) > 0;
  WordSort sort(accesses, a.layout, beside, words);
  a.words = sort.words();
  a.numbers = sort.numbers();
  auto* const on = reinterpret_cast<void*>(stream);
  make_words(a, described, number, buckets, on);
  sort.run(on);
  return {sort.positions(), sort.run_start(), sort.run_slot(), sort.before()};
}

}  // namespace

WordSort::WordSort(int64_t accesses, const WordLayout& layout, bool beside,
                   const at::TensorOptions& options) {
  const auto numbers = options.dtype(at::kInt);
  for (int n = 0; n < 2; ++n) {
    word[n] = at::empty({accesses}, options);
    arguments.words[n] = static_cast<uint64_t*>(word[n].mutable_data_ptr());
    if (n > 0 && !beside) continue;
    called[n] = at::empty({accesses}, numbers);
    if (beside) arguments.numbers[n] = called[n].mutable_data_ptr<int32_t>();
  }
  if (!beside) arguments.positions = called[0].mutable_data_ptr<int32_t>();
  starts = at::empty({accesses + 1}, numbers);
  count = at::empty({1}, numbers);
  runs_before = at::empty({layout.groups + 1}, options);
  arguments.accesses = accesses;
  arguments.layout = layout;
  arguments.runs = count.mutable_data_ptr<int32_t>();
  arguments.run_start = starts.mutable_data_ptr<int32_t>();
  arguments.before = runs_before.mutable_data_ptr<int64_t>();
}

void WordSort::run(void* stream) {
  check_device(device_library().sort_scratch(&arguments, &arguments.scratch_bytes),
               "the sort could not be prepared");
  const at::Tensor scratch = at::empty({static_cast<int64_t>(arguments.scratch_bytes)},
                                       word[0].options().dtype(at::kByte));
  arguments.scratch = static_cast<uint8_t*>(scratch.mutable_data_ptr());
  check_device(device_library().sort(&arguments, &sorted, stream), "the sort could not be started");
}

}  // namespace oper

TORCH_LIBRARY_IMPL(oper, CUDA, m) { m.impl("sort_accesses", oper::sort_accesses); }

// sort_accesses for tests, of memory that the emulator takes for a device's.
TORCH_LIBRARY_FRAGMENT(oper_emulated, m) { m.def(oper::schemas::kSortAccesses); }
TORCH_LIBRARY_IMPL(oper_emulated, CPU, m) { m.impl("sort_accesses", oper::sort_accesses); }
