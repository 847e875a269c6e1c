// torch.ops.oper.lay_out_gradients and merge_gradients: the gradients of a batch's rows in one
// array, by bucket and owner, and those of two batches as one (gradient accumulation).

#include "cpu/step/row_groups.h"

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>
#include <tuple>
#include <vector>

#include "oper/step/gradient_layout.h"
#include "oper/step/merge_gradients.h"
#include "schemas.h"

namespace oper {
namespace {

// The groups of a bucket, where all have as many.
int64_t groups_of_bucket(int64_t groups, at::IntArrayRef dims) {
  const auto buckets = static_cast<int64_t>(dims.size());
  OPER_CHECK_VALUE(buckets == 0 ? groups == 0 : groups % buckets == 0, "dims: ", buckets,
                   " buckets, and ", groups, " groups");
  for (const int64_t dim : dims) check_size(dim, 0, kMostRows, "dims");
  return buckets == 0 ? 1 : groups / buckets;
}

// The values before the gradients of each group, from the rows before each.
void place_values(const int64_t* before, int64_t groups, at::IntArrayRef dims, int64_t* value) {
  const int64_t of_bucket = groups_of_bucket(groups, dims);
  for (size_t b = 0; b < dims.size(); ++b) {
    const int64_t rows = before[(b + 1) * of_bucket] - before[b * of_bucket];
    check_size(product(rows, dims[b], "before"), 0, kMostBytes / kMostThings, "before: values");
  }
  place_gradients(before, static_cast<int64_t>(dims.size()), of_bucket, dims.data(), value);
}

at::Tensor lay_out_gradients(const at::Tensor& before, at::IntArrayRef dims, int64_t /*stream*/) {
  const int64_t groups = before.numel() - 1;
  const auto* const rows = elements_at_least<int64_t>(before, 1, "before");
  check_offsets_from_zero(rows, groups, "before", "group");
  at::Tensor laid_out = at::empty({2, groups + 1}, at::kLong);
  auto* const out = laid_out.mutable_data_ptr<int64_t>();
  std::copy_n(rows, groups + 1, out);
  place_values(rows, groups, dims, out + groups + 1);
  return laid_out;
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> merge_gradients(at::TensorList slots,
                                                               at::TensorList values,
                                                               at::TensorList groups,
                                                               at::IntArrayRef dims,
                                                               int64_t /*stream*/) {
  OPER_CHECK_VALUE(!slots.empty() && slots.size() == values.size() && slots.size() == groups.size(),
                   "slots, values, groups: expected equal numbers of them, at least one, got ",
                   slots.size(), ", ", values.size(), " and ", groups.size());
  const int64_t number = groups[0].size(-1) - 1, of_bucket = groups_of_bucket(number, dims);
  int64_t most = 0;
  for (size_t n = 0; n < slots.size(); ++n) {
    OPER_CHECK_VALUE(groups[n].sizes() == groups[0].sizes(), "groups: of unlike shapes");
    most += row_group(groups[n], 0, number, 0, slots[n].numel(), 0).rows();
  }
  at::Tensor merged = at::empty({most}, at::kLong),
             laid_out = at::empty({2, number + 1}, at::kLong);
  auto* const slot = merged.mutable_data_ptr<int64_t>();
  auto* const before = laid_out.mutable_data_ptr<int64_t>();
  const auto lists_of = [&](int64_t group) {
    std::vector<Gradients> lists;
    for (size_t n = 0; n < slots.size(); ++n) {
      const RowGroup of = row_group(groups[n], group, group + 1, dims[group / of_bucket],
                                    slots[n].numel(), values[n].numel());
      if (of.rows() > 0)
        lists.push_back({elements<int64_t>(slots[n], "slots") + of.begin,
                         elements<float>(values[n], "values") + of.value, 0, of.rows()});
    }
    return lists;
  };
  const auto nothing = [](int64_t) {};
  std::vector<float> sum(dims.empty() ? 0 : *std::max_element(dims.begin(), dims.end()));
  before[0] = 0;
  for (int64_t g = 0; g < number; ++g) {
    int64_t* next = slot + before[g];
    const auto keep = [&](int64_t of, const float*) { *next++ = of; };
    before[g + 1] = before[g] + merge(lists_of(g), 0, 0, sum.data(), nothing, keep);
  }
  place_values(before, number, dims, before + number + 1);
  at::Tensor sums = at::empty({before[2 * number + 1]}, at::kFloat);
  for (int64_t g = 0; g < number; ++g) {
    const int64_t dim = dims[g / of_bucket];
    float* next = sums.mutable_data_ptr<float>() + before[number + 1 + g];
    merge(lists_of(g), dim, 0, sum.data(), nothing,
          [&](int64_t, const float* gradient) { next = std::copy_n(gradient, dim, next); });
  }
  return {merged.narrow(0, 0, before[number]), laid_out, sums};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(oper, m) {
  m.def(oper::schemas::kLayOutGradients);
  m.def(oper::schemas::kMergeGradients);
}

TORCH_LIBRARY_IMPL(oper, CPU, m) {
  m.impl("lay_out_gradients", lay_out_gradients);
  m.impl("merge_gradients", merge_gradients);
}

}  // namespace oper
