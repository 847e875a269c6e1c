// torch.ops.oper.pooled_rows, pooled_rows_by_gets, weight_gradients, check_bags and post_report on
// a device. Features are in host memory and checked there; addresses and offsets are the device's,
// which only a wait could check: addresses are those of `translate`, and what check_bags found of
// the offsets is in the report.

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <algorithm>
#include <map>
#include <optional>
#include <tuple>
#include <vector>

#include "cpu/common/arguments.h"
#include "cpu/step/batch_arguments.h"
#include "device/arguments.h"
#include "device/library.h"
#include "device/nvshmem.h"
#include "oper/step/feature.h"
#include "schemas.h"

namespace oper {
namespace {

// Features whose rows one launch can read.
// dtype, dim, row_bytes, width, and whether some of the rows are far
using Shape = std::tuple<int64_t, int64_t, int64_t, int64_t, bool>;

std::map<Shape, std::vector<const Feature*>> by_shape(const Feature* features, int64_t count,
                                                      const bool* far) {
  std::map<Shape, std::vector<const Feature*>> found;
  for (int64_t f = 0; f < count; ++f) {
    const Feature& feature = features[f];
    if (feature.bags <= 0 || feature.dim <= 0) continue;
    const bool is_far = far && far[f];
    found[{feature.dtype, feature.dim, feature.row_bytes, feature.width, is_far}].push_back(
        &feature);
  }
  return found;
}

// What a lookup's rows are, checked: all that RowArguments has but the features.
template <typename Arguments>
Arguments rows_of(const at::Tensor& addresses, const std::optional<at::Tensor>& offsets,
                  const at::Tensor& bases, int64_t rank, const std::optional<at::Tensor>& report) {
  check_bases(bases, rank);
  check_on(bases, addresses, "bases");
  Arguments a{};
  a.addresses = elements<int64_t>(addresses, "addresses");
  if (offsets) {
    check_on(*offsets, addresses, "offsets");
    set_offsets(*offsets, a);
  }
  if (report) check_on(*report, addresses, "report");
  a.report = report_of(report);
  a.ranks = bases.size(1) - 1;
  a.rank = rank;
  return a;
}

// One launch: `features` features, of rows some of which may be `far`. `places` has all bits of the
// places of their bags in the output, and of the distances between them.
struct LaunchOf {
  int64_t row_type, width, features, places;
  bool far;
};

// f(launch) with `a` set for each launch that a batch needs. `far` says of each feature whether
// rows of its may be far: null, none.
template <typename Arguments, typename F>
void for_each_launch(const at::Tensor& features, const at::Tensor& bases, Arguments& a, const F& f,
                     const bool* far = nullptr) {
  const int64_t* const arenas = elements<int64_t>(bases, "bases");
  for (const auto& [shape, same] :
       by_shape(structs<Feature>(features, "features"), features.size(0), far)) {
    int64_t row_type, width;
    bool is_far;
    std::tie(row_type, a.dim, a.row_bytes, width, is_far) = shape;
    a.arenas = arenas + width * bases.size(1);
    for (size_t first = 0; first < same.size(); first += kMostFeatures) {
      const size_t count = std::min<size_t>(kMostFeatures, same.size() - first);
      int64_t places = 0;
      for (size_t n = 0; n < count; ++n) {
        const Feature& feature = *same[first + n];
        a.features[n] = {feature.first_bag, feature.bags, feature.out_base, feature.out_stride,
                         feature.mean};
        places |= feature.out_base | feature.out_stride;
      }
      f(LaunchOf{row_type, width, static_cast<int64_t>(count), places, is_far});
    }
  }
}

// What a lookup puts out, from its arguments; sets all of `a` but the features.
at::Tensor set_output(LookupArguments& a, const at::Tensor& addresses,
                      const std::optional<at::Tensor>& offsets,
                      const std::optional<at::Tensor>& weights, const at::Tensor& features,
                      const at::Tensor& bases, int64_t out_elements, at::ScalarType out_dtype) {
  a.out_type = output_type(out_dtype);
  if (weights) {
    check_on(*weights, addresses, "weights");
    a.weights = elements<float>(*weights, addresses.numel(), "weights");
  }
  const int64_t bags = bags_of(addresses, offsets);
  const int64_t written = check_features(structs<Feature>(features, "features"), features.size(0),
                                         bags, bases.size(0), out_elements);
  at::Tensor result = at::empty({out_elements}, addresses.options().dtype(out_dtype));
  if (written < out_elements) result.zero_();
  a.short_bags = !weights && addresses.numel() <= bags;
  a.out = static_cast<uint8_t*>(result.mutable_data_ptr());
  return result;
}

void set_wide_stores(LookupArguments& a, int64_t places) {
  a.wide_stores = (places | reinterpret_cast<int64_t>(a.out) / 4) % 4 == 0;
}

at::Tensor pooled_rows(const at::Tensor& addresses, const std::optional<at::Tensor>& offsets,
                       const std::optional<at::Tensor>& weights, const at::Tensor& features,
                       const at::Tensor& bases, int64_t rank, int64_t out_elements,
                       at::ScalarType out_dtype, int64_t stream,
                       const std::optional<at::Tensor>& report) {
  const c10::DeviceGuard guard(addresses.device());
  auto a = rows_of<LookupArguments>(addresses, offsets, bases, rank, report);
  at::Tensor result =
      set_output(a, addresses, offsets, weights, features, bases, out_elements, out_dtype);
  for_each_launch(features, bases, a, [&](const LaunchOf& of) {
    set_wide_stores(a, of.places);
    check_device(
        device_library().lookup(&a, of.row_type, of.features, reinterpret_cast<void*>(stream)),
        "the lookup could not be started");
  });
  return result;
}

// As pooled_rows, where some ranks' memory is not mapped: their bases are 0, and `symmetric`
// [widths, ranks + 1] says where they lie in this rank's symmetric memory. Features of which `far`,
// bool [features] on the host, says so may read such rows, which come through `stage`; the others
// are looked up by the kernel of pooled_rows.
at::Tensor pooled_rows_by_gets(const at::Tensor& addresses,
                               const std::optional<at::Tensor>& offsets,
                               const std::optional<at::Tensor>& weights, const at::Tensor& features,
                               const at::Tensor& bases, const at::Tensor& symmetric,
                               const at::Tensor& far, const at::Tensor& stage, int64_t rank,
                               int64_t out_elements, at::ScalarType out_dtype, int64_t stream,
                               const std::optional<at::Tensor>& report) {
  const c10::DeviceGuard guard(addresses.device());
  auto a = rows_of<GetArguments>(addresses, offsets, bases, rank, report);
  check_on(symmetric, addresses, "symmetric");
  check_on(stage, addresses, "stage");
  OPER_CHECK_VALUE(symmetric.sizes() == bases.sizes(), "symmetric: expected one per base, ",
                   bases.sizes(), ", got ", symmetric.sizes());
  const auto* const there = elements<int64_t>(symmetric, "symmetric");
  at::Tensor result =
      set_output(a, addresses, offsets, weights, features, bases, out_elements, out_dtype);
  const auto launched = [&](const LaunchOf& of) {
    set_wide_stores(a, of.places);
    const auto on = reinterpret_cast<void*>(stream);
    if (!of.far) {
      check_device(device_library().lookup(&a, of.row_type, of.features, on),
                   "the lookup could not be started");
      return;
    }
    a.symmetric = there + of.width * bases.size(1);
    a.stage = stage.mutable_data_ptr<uint8_t>();
    a.stage_bytes = stage.numel();
    check_device(
        nvshmem_library().lookup(&a, of.row_type, of.features, on),
        "the lookup in the memory of other nodes could not be started (rows may be longer than its "
        "stage has room for)");
  };
  for_each_launch(features, bases, a, launched, elements<bool>(far, features.size(0), "far"));
  return result;
}

at::Tensor weight_gradients(const at::Tensor& grad, const at::Tensor& addresses,
                            const std::optional<at::Tensor>& offsets, const at::Tensor& weights,
                            const at::Tensor& features, const at::Tensor& bases, int64_t rank,
                            int64_t stream, const std::optional<at::Tensor>& report) {
  const c10::DeviceGuard guard(addresses.device());
  auto a = rows_of<WeightArguments>(addresses, offsets, bases, rank, report);
  check_on(weights, addresses, "weights");
  elements<float>(weights, addresses.numel(), "weights");
  check_on(grad, addresses, "grad");
  check_contiguous(grad, "grad");
  check_features(structs<Feature>(features, "features"), features.size(0),
                 bags_of(addresses, offsets), bases.size(0), grad.numel());
  a.grad = static_cast<const uint8_t*>(grad.const_data_ptr());
  a.grad_type = float_type(grad, "grad");
  at::Tensor result = at::zeros_like(weights);
  a.out = result.mutable_data_ptr<float>();
  const auto place = reinterpret_cast<int64_t>(a.grad) / grad.element_size();
  for_each_launch(features, bases, a, [&](const LaunchOf& of) {
    a.wide = (of.places | place | a.dim) % 4 == 0;
    check_device(device_library().weight_gradients(&a, of.row_type, of.features,
                                                   reinterpret_cast<void*>(stream)),
                 "the gradients of weights could not be started");
  });
  return result;
}

// Looks for bags whose offsets do not ascend from 0 to the number of values.
void check_bags(const at::Tensor& offsets, int64_t values, const at::Tensor& report,
                int64_t stream) {
  const c10::DeviceGuard guard(offsets.device());
  check_on(report, offsets, "report");
  BagArguments a{};
  set_offsets(offsets, a);
  a.bags = offsets.numel() - 1;
  a.values = values;
  a.report = report_of(report);
  check_device(device_library().check_bags(&a, reinterpret_cast<void*>(stream)),
               "the check of a batch could not be started");
}

// `slots` [n, 2] are the host's, in memory that devices can write.
void post_report(const at::Tensor& report, at::Tensor& slots, at::Tensor& posted, int64_t stream) {
  const c10::DeviceGuard guard(report.device());
  check_on(posted, report, "posted");
  OPER_CHECK_VALUE(slots.dim() == 2 && slots.size(0) > 0 && slots.size(1) == 2,
                   "slots: expected [slots, 2], at least one, got ", slots.sizes());
  auto* const to = writable_elements<int64_t>(slots, 2, "slots");
  check_device(
      device_library().post_report(report_of(report), reinterpret_cast<BatchReport*>(to),
                                   slots.size(0), writable_elements<int64_t>(posted, 1, "posted"),
                                   reinterpret_cast<void*>(stream)),
      "a report could not be posted");
}

}  // namespace
}  // namespace oper

TORCH_LIBRARY_FRAGMENT(oper, m) {
  m.def(oper::schemas::kPooledRowsByGets);
  m.def(oper::schemas::kCheckBags);
  m.def(oper::schemas::kPostReport);
}
TORCH_LIBRARY_IMPL(oper, CUDA, m) {
  m.impl("pooled_rows", oper::pooled_rows);
  m.impl("pooled_rows_by_gets", oper::pooled_rows_by_gets);
  m.impl("weight_gradients", oper::weight_gradients);
  m.impl("check_bags", oper::check_bags);
  m.impl("post_report", oper::post_report);
}

// For tests, of memory that the emulator takes for a device's.
TORCH_LIBRARY_FRAGMENT(oper_emulated, m) {
  m.def(oper::schemas::kPooledRowsByGets);
  m.def(oper::schemas::kPooledRows);
  m.def(oper::schemas::kWeightGradients);
  m.def(oper::schemas::kCheckBags);
  m.def(oper::schemas::kPostReport);
}
TORCH_LIBRARY_IMPL(oper_emulated, CPU, m) {
  m.impl("pooled_rows", oper::pooled_rows);
  m.impl("pooled_rows_by_gets", oper::pooled_rows_by_gets);
  m.impl("weight_gradients", oper::weight_gradients);
  m.impl("check_bags", oper::check_bags);
  m.impl("post_report", oper::post_report);
}
