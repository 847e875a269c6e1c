// torch.ops.oper.lay_out_gradients and merge_gradients on a device: how many rows there are of each
// group lies there, and nobody waits for it. sort_accesses vouches that the rows before groups
// ascend from 0, and that the slots of a group do.

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <algorithm>
#include <limits>
#include <tuple>

#include "cpu/common/arguments.h"
#include "cpu/step/row_groups.h"
#include "device/library.h"
#include "oper/step/gradient_layout.h"
#include "schemas.h"

namespace oper {
namespace {

// The dims of the buckets of `groups` groups.
BucketDims bucket_dims(int64_t groups, at::IntArrayRef dims) {
  BucketDims found{};
  found.buckets = static_cast<int64_t>(dims.size());
  OPER_CHECK_VALUE(found.buckets <= kMostBuckets, "dims: ", found.buckets, " buckets, and at most ",
                   kMostBuckets, " can be laid out on a device");
  OPER_CHECK_VALUE(found.buckets == 0 ? groups == 0 : groups % found.buckets == 0,
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

// Gradients of a batch's rows; slots and values may have room for more.
struct Gradients {
  at::Tensor slots, groups, values;
};

MergeList list_of(const Gradients& given, const at::Tensor& others) {
  check_on(given.slots, others, "slots");
  check_on(given.groups, others, "groups");
  check_on(given.values, others, "values");
  MergeList list{};
  list.slots = elements<int64_t>(given.slots, "slots");
  list.values = elements<float>(given.values, "values");
  list.groups = elements<int64_t>(given.groups, "groups");
  return list;
}

// Two lists as one, with room for all that they have room for: the second's rows may be others,
// and its buckets' values may begin at lines where they have not.
Gradients merge_two(const Gradients& first, const Gradients& second, const BucketDims& dims,
                    void* stream) {
  const auto words = first.groups.options(), numbers = words.dtype(at::kInt);
  MergeArguments a{};
  a.dims = dims;
  a.list[0] = list_of(first, first.groups);
  a.list[1] = list_of(second, first.groups);
  a.most_rows[0] = first.slots.numel();
  a.most_rows[1] = second.slots.numel();
  const int64_t rows = a.most_rows[0] + a.most_rows[1];
  // The kernels keep the places of rows in 32 bits.
  check_size(rows, 0, std::numeric_limits<int32_t>::max() - 1, "slots: of all lists");
  a.most_values = first.values.numel() + second.values.numel() + dims.buckets * kLineValues;
  Gradients merged{at::empty({rows}, words), at::empty_like(first.groups),
                   at::empty({a.most_values}, words.dtype(at::kFloat))};
  a.slots = merged.slots.mutable_data_ptr<int64_t>();
  a.groups = merged.groups.mutable_data_ptr<int64_t>();
  a.values = merged.values.mutable_data_ptr<float>();

  const int64_t strips = a.most_rows[1] / kMergeStrip + 1;
  at::Tensor places = at::empty({rows}, numbers), sources = at::empty({rows}, words);
  at::Tensor fresh = at::empty({a.most_rows[1] + 1}, numbers);
  at::Tensor in_strips = at::empty({strips}, numbers);
  at::Tensor in_warps = at::empty({kCountWarps}, numbers);
  a.list[0].place = places.mutable_data_ptr<int32_t>();
  a.list[1].place = a.list[0].place + a.most_rows[0];
  a.new_in_strip = fresh.mutable_data_ptr<int32_t>();
  a.new_in_strips = in_strips.mutable_data_ptr<int32_t>();
  a.new_in_warps = in_warps.mutable_data_ptr<int32_t>();
  static_assert(sizeof(SumSource) == sizeof(int64_t));
  a.sources = static_cast<SumSource*>(sources.mutable_data_ptr());
  check_device(device_library().merge_gradients(&a, stream),
               "merging gradients could not be started");
  return merged;
}

// Sums are made in the order of the lists where one list after another is added.
std::tuple<at::Tensor, at::Tensor, at::Tensor> merge_gradients(at::TensorList slots,
                                                               at::TensorList values,
                                                               at::TensorList groups,
                                                               at::IntArrayRef dims,
                                                               int64_t stream) {
  OPER_CHECK_VALUE(!slots.empty() && slots.size() == values.size() && slots.size() == groups.size(),
                   "slots, values, groups: expected equal numbers of them, at least one, got ",
                   slots.size(), ", ", values.size(), " and ", groups.size());
  const c10::DeviceGuard guard(groups[0].device());
  const int64_t count = count_groups(groups[0], "groups");
  for (const at::Tensor& of : groups)
    OPER_CHECK_VALUE(of.sizes() == groups[0].sizes(), "groups: of unlike shapes");
  const auto words = groups[0].options();
  const Gradients none{at::empty({0}, words), at::zeros(groups[0].sizes(), words),
                       at::empty({0}, words.dtype(at::kFloat))};
  const BucketDims buckets = bucket_dims(count, dims);
  if (count == 0) return {none.slots, none.groups, none.values};
  Gradients merged{slots[0], groups[0], values[0]};
  for (size_t n = 1; n < std::max<size_t>(slots.size(), 2); ++n)
    merged = merge_two(merged, n < slots.size() ? Gradients{slots[n], groups[n], values[n]} : none,
                       buckets, reinterpret_cast<void*>(stream));
  return {merged.slots, merged.groups, merged.values};
}

}  // namespace
}  // namespace oper

TORCH_LIBRARY_IMPL(oper, CUDA, m) {
  m.impl("lay_out_gradients", oper::lay_out_gradients);
  m.impl("merge_gradients", oper::merge_gradients);
}

// For tests, of memory that the emulator takes for a device's.
TORCH_LIBRARY_FRAGMENT(oper_emulated, m) {
  m.def(oper::schemas::kLayOutGradients);
  m.def(oper::schemas::kMergeGradients);
}
TORCH_LIBRARY_IMPL(oper_emulated, CPU, m) {
  m.impl("lay_out_gradients", oper::lay_out_gradients);
  m.impl("merge_gradients", oper::merge_gradients);
}
