// torch.ops.oper.accesses_by_rank on a device. Features are in host memory and checked there, and
// so are their segments where there is no report; with one they are the device's. An address that
// names no rank is not counted.

#include <ATen/ops/zeros.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <algorithm>

#include "cpu/step/batch_arguments.h"
#include "device/library.h"
#include "schemas.h"

namespace oper {
namespace {

at::Tensor accesses_by_rank(const at::Tensor& addresses, const at::Tensor& segment_offset,
                            const at::Tensor& features, int64_t buckets, int64_t rank,
                            int64_t ranks, int64_t stream,
                            const std::optional<at::Tensor>& report) {
  const c10::DeviceGuard guard(addresses.device());
  check_size(ranks, 1, kMostThings, "ranks");
  check_size(rank, 0, ranks - 1, "rank");
  check_size(buckets, 0, kMostThings / ranks, "buckets");
  const auto* const described = structs<Feature>(features, "features");
  const int64_t number = features.size(0);
  if (!report)
    elements<int64_t>(addresses, features_of(features, segment_offset).accesses(), "addresses");
  // Not waited for, where they come from the host: torch would wait for all that was started.
  const at::Tensor segments = segment_offset.to(addresses.options(), /*non_blocking=*/true);
  const auto* const begins = elements<int64_t>(segments, number + 1, "segment_offset");
  CountArguments a{};
  a.addresses = elements<int64_t>(addresses, "addresses");
  a.report = report_of(report);
  a.rank = rank;
  a.ranks = ranks;
  at::Tensor counts = at::zeros({buckets, ranks + 1}, addresses.options());
  a.counts = counts.mutable_data_ptr<int64_t>();
  for (int64_t first = 0; first < number; first += kMostFeatures) {
    const int64_t count = std::min<int64_t>(kMostFeatures, number - first);
    for (int64_t n = 0; n < count; ++n) {
      const int64_t bucket = described[first + n].bucket;
      OPER_CHECK_VALUE(bucket >= 0 && bucket < buckets, "features: number ", first + n,
                       " is of bucket ", bucket, ", and there are ", buckets);
      a.bucket[n] = bucket;
    }
    a.segment_offset = begins + first;
    const int64_t mean = (addresses.numel() + number - 1) / number;
    check_device(
        device_library().accesses_by_rank(&a, count, mean, reinterpret_cast<void*>(stream)),
        "counting accesses could not be started");
  }
  return counts;
}

}  // namespace
}  // namespace oper

TORCH_LIBRARY_IMPL(oper, CUDA, m) { m.impl("accesses_by_rank", oper::accesses_by_rank); }

// accesses_by_rank for tests, of memory that the emulator takes for a device's.
TORCH_LIBRARY_FRAGMENT(oper_emulated, m) { m.def(oper::schemas::kAccessesByRank); }
TORCH_LIBRARY_IMPL(oper_emulated, CPU, m) { m.impl("accesses_by_rank", oper::accesses_by_rank); }
