// torch.ops.oper.pooled_rows and check_bags on a device. Features are in host memory and checked
// there; addresses and offsets are the device's, which only a wait could check: addresses are those
// of `translate`, and what check_bags found of the offsets is in the report.

#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <algorithm>
#include <map>
#include <optional>
#include <tuple>
#include <vector>

#include "cpu/common/arguments.h"
#include "cpu/step/batch_arguments.h"
#include "device/library.h"
#include "oper/step/feature.h"

namespace oper {
namespace {

// Features whose rows one launch can read.
using Shape = std::tuple<int64_t, int64_t, int64_t, int64_t>;  // dtype, dim, row_bytes, width

std::map<Shape, std::vector<const Feature*>> by_shape(const Feature* features, int64_t count) {
  std::map<Shape, std::vector<const Feature*>> found;
  for (int64_t f = 0; f < count; ++f) {
    const Feature& feature = features[f];
    if (feature.bags > 0 && feature.dim > 0)
      found[{feature.dtype, feature.dim, feature.row_bytes, feature.width}].push_back(&feature);
  }
  return found;
}

at::Tensor pooled_rows(const at::Tensor& addresses, const std::optional<at::Tensor>& offsets,
                       const std::optional<at::Tensor>& weights, const at::Tensor& features,
                       const at::Tensor& bases, int64_t rank, int64_t out_elements,
                       at::ScalarType out_dtype, int64_t stream,
                       const std::optional<at::Tensor>& report) {
  const c10::DeviceGuard guard(addresses.device());
  const RowType out_type = output_type(out_dtype);
  const auto* const described = structs<Feature>(features, "features");
  check_bases(bases, rank);
  check_on(bases, addresses, "bases");
  LookupArguments a{};
  a.addresses = elements<int64_t>(addresses, "addresses");
  if (offsets) {
    check_on(*offsets, addresses, "offsets");
    with_index_type(offsets->scalar_type(), "offsets", [&](auto offset) {
      const auto* const begins = elements<decltype(offset)>(*offsets, "offsets");
      if constexpr (sizeof(offset) == 4)
        a.offsets32 = begins;
      else
        a.offsets64 = begins;
    });
  }
  if (weights) {
    check_on(*weights, addresses, "weights");
    a.weights = elements<float>(*weights, addresses.numel(), "weights");
  }
  const int64_t written = check_features(described, features.size(0), bags_of(addresses, offsets),
                                         bases.size(0), out_elements);
  at::Tensor result = at::empty({out_elements}, addresses.options().dtype(out_dtype));
  if (written < out_elements) result.zero_();
  if (report) check_on(*report, addresses, "report");
  a.report = report_of(report);
  a.short_bags = !weights && addresses.numel() <= bags_of(addresses, offsets);
  a.ranks = bases.size(1) - 1;
  a.rank = rank;
  a.out = static_cast<uint8_t*>(result.mutable_data_ptr());
  a.out_type = out_type;
  const int64_t* const arenas = elements<int64_t>(bases, "bases");
  const DeviceLibrary& library = device_library();
  for (const auto& [shape, same] : by_shape(described, features.size(0))) {
    int64_t row_type, width;
    std::tie(row_type, a.dim, a.row_bytes, width) = shape;
    a.arenas = arenas + width * bases.size(1);
    for (size_t first = 0; first < same.size(); first += kMostFeatures) {
      const size_t count = std::min<size_t>(kMostFeatures, same.size() - first);
      int64_t most_bags = 0, places = reinterpret_cast<int64_t>(a.out) / 4;
      for (size_t n = 0; n < count; ++n) {
        const Feature& f = *same[first + n];
        a.features[n] = {f.first_bag, f.bags, f.out_base, f.out_stride, f.mean};
        most_bags = std::max(most_bags, f.bags);
        places |= f.out_base | f.out_stride;
      }
      a.wide_stores = places % 4 == 0;
      check_device(library.lookup(&a, row_type, static_cast<int64_t>(count), most_bags,
                                  reinterpret_cast<void*>(stream)),
                   "the lookup could not be started");
    }
  }
  return result;
}

// Looks for bags whose offsets do not ascend from 0 to the number of values.
void check_bags(const at::Tensor& offsets, int64_t values, const at::Tensor& report,
                int64_t stream) {
  const c10::DeviceGuard guard(offsets.device());
  check_on(report, offsets, "report");
  TORCH_CHECK_VALUE(offsets.numel() > 0, "offsets: bags + 1 elements were needed");
  BagArguments a{};
  with_index_type(offsets.scalar_type(), "offsets", [&](auto offset) {
    const auto* const begins = elements<decltype(offset)>(offsets, "offsets");
    if constexpr (sizeof(offset) == 4)
      a.offsets32 = begins;
    else
      a.offsets64 = begins;
  });
  a.bags = offsets.numel() - 1;
  a.values = values;
  a.report = report_of(report);
  check_device(device_library().check_bags(&a, reinterpret_cast<void*>(stream)),
               "the check of a batch could not be started");
}

}  // namespace
}  // namespace oper

TORCH_LIBRARY_FRAGMENT(oper, m) {
  m.def("check_bags(Tensor offsets, int values, Tensor(a!) report, int stream) -> ()");
}
TORCH_LIBRARY_IMPL(oper, CUDA, m) {
  m.impl("pooled_rows", oper::pooled_rows);
  m.impl("check_bags", oper::check_bags);
}

// Both for tests, of memory that the emulator takes for a device's.
TORCH_LIBRARY_FRAGMENT(oper_emulated, m) {
  m.def(
      "pooled_rows(Tensor addresses, Tensor? offsets, Tensor? weights, Tensor features,"
      " Tensor bases, int rank, int out_elements, ScalarType out_dtype, int stream=0,"
      " Tensor? report=None) -> Tensor");
  m.def("check_bags(Tensor offsets, int values, Tensor(a!) report, int stream) -> ()");
}
TORCH_LIBRARY_IMPL(oper_emulated, CPU, m) {
  m.impl("pooled_rows", oper::pooled_rows);
  m.impl("check_bags", oper::check_bags);
}
