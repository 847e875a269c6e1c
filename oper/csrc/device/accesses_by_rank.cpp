// torch.ops.oper.accesses_by_rank on a device. Features and their segments are in host memory and
// checked there; an address that names no rank is not counted.

#include <ATen/ops/zeros.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <algorithm>

#include "cpu/step/batch_arguments.h"
#include "device/library.h"

namespace oper {
namespace {

at::Tensor accesses_by_rank(const at::Tensor& addresses, const at::Tensor& segment_offset,
                            const at::Tensor& features, int64_t buckets, int64_t rank,
                            int64_t ranks, int64_t stream) {
  const c10::DeviceGuard guard(addresses.device());
  check_size(ranks, 1, kMostThings, "ranks");
  check_size(rank, 0, ranks - 1, "rank");
  check_size(buckets, 0, kMostThings / ranks, "buckets");
  const Features of = features_of(features, segment_offset);
  CountArguments a{};
  a.addresses = elements<int64_t>(addresses, of.accesses(), "addresses");
  a.rank = rank;
  a.ranks = ranks;
  at::Tensor counts = at::zeros({buckets, ranks + 1}, addresses.options());
  a.counts = counts.mutable_data_ptr<int64_t>();
  for (int64_t first = 0; first < of.count; first += kMostFeatures) {
    const int64_t count = std::min<int64_t>(kMostFeatures, of.count - first);
    int64_t most = 0;
    for (int64_t n = 0; n < count; ++n) {
      const int64_t f = first + n;
      TORCH_CHECK_VALUE(of[f].bucket >= 0 && of[f].bucket < buckets, "features: number ", f,
                        " is of bucket ", of[f].bucket, ", and there are ", buckets);
      a.features[n] = {of.begin(f), of.end(f), of[f].bucket};
      most = std::max(most, of.end(f) - of.begin(f));
    }
    check_device(
        device_library().accesses_by_rank(&a, count, most, reinterpret_cast<void*>(stream)),
        "counting accesses could not be started");
  }
  return counts;
}

}  // namespace
}  // namespace oper

TORCH_LIBRARY_IMPL(oper, CUDA, m) { m.impl("accesses_by_rank", oper::accesses_by_rank); }

// accesses_by_rank for tests, of memory that the emulator takes for a device's.
TORCH_LIBRARY_FRAGMENT(oper_emulated, m) {
  m.def(
      "accesses_by_rank(Tensor addresses, Tensor segment_offset, Tensor features, int buckets,"
      " int rank, int ranks, int stream=0) -> Tensor");
}
TORCH_LIBRARY_IMPL(oper_emulated, CPU, m) { m.impl("accesses_by_rank", oper::accesses_by_rank); }
