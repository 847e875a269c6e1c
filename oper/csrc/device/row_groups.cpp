// torch.ops.oper.lay_out_gradients on a device: how many rows there are of each group lies there,
// and nobody waits for it. sort_accesses vouches that the rows before groups ascend from 0.

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <algorithm>
#include <limits>

#include "cpu/common/arguments.h"
#include "device/library.h"

namespace oper {
namespace {

// The dims of the buckets of `groups` groups.
BucketDims bucket_dims(int64_t groups, at::IntArrayRef dims) {
  BucketDims found{};
  found.buckets = static_cast<int64_t>(dims.size());
  TORCH_CHECK_VALUE(found.buckets <= kMostBuckets, "dims: ", found.buckets,
                    " buckets, and at most ", kMostBuckets, " can be laid out on a device");
  TORCH_CHECK_VALUE(found.buckets == 0 ? groups == 0 : groups % found.buckets == 0,
                    "dims: ", found.buckets, " buckets, and ", groups, " groups");
  found.of_bucket = found.buckets == 0 ? 1 : groups / found.buckets;
  for (const int64_t dim : dims) check_size(dim, 0, std::numeric_limits<int32_t>::max(), "dims");
  std::copy(dims.begin(), dims.end(), found.dim);
  return found;
}

at::Tensor lay_out_gradients(const at::Tensor& before, at::IntArrayRef dims, int64_t stream) {
  const c10::DeviceGuard guard(before.device());
  const int64_t groups = before.numel() - 1;
  const auto* const rows = elements_at_least<int64_t>(before, 1, "before");
  const BucketDims buckets = bucket_dims(groups, dims);
  if (groups == 0) return at::zeros({2, 1}, before.options());
  at::Tensor laid_out = at::empty({2, groups + 1}, before.options());
  check_device(
      device_library().lay_out_gradients(&buckets, rows, laid_out.mutable_data_ptr<int64_t>(),
                                         reinterpret_cast<void*>(stream)),
      "laying out gradients could not be started");
  return laid_out;
}

}  // namespace
}  // namespace oper

TORCH_LIBRARY_IMPL(oper, CUDA, m) { m.impl("lay_out_gradients", oper::lay_out_gradients); }

// For tests, of memory that the emulator takes for a device's.
TORCH_LIBRARY_FRAGMENT(oper_emulated, m) {
  m.def("lay_out_gradients(Tensor before, int[] dims, int stream=0) -> Tensor groups");
}
TORCH_LIBRARY_IMPL(oper_emulated, CPU, m) { m.impl("lay_out_gradients", oper::lay_out_gradients); }
