// torch.ops.oper.count_sources: how many of each feature's accesses read from each rank.

#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include "counters.h"
#include "oper/address.h"

namespace oper {
namespace {

// A pass for each rank compares without a branch, and beats a histogram while ranks are few.
constexpr int64_t kFewRanks = 16;

int64_t count_field(const int64_t* addresses, int64_t size, int64_t field) {
  int64_t count = 0;
  for (int64_t n = 0; n < size; ++n) count += (addresses[n] >> kSlotBits) == field;
  return count;
}

at::Tensor count_sources(const at::Tensor& addresses, const at::Tensor& segment_offset,
                         int64_t rank, int64_t ranks) {
  const int64_t features = segment_offset.numel() - 1;
  const int64_t* address = int64s(addresses, addresses.numel(), "addresses");
  const int64_t* offset = int64s(segment_offset, features + 1, "segment_offset");
  TORCH_CHECK_VALUE(offset[features] == addresses.numel(),
                    "segment_offset: must end at the number of addresses");
  at::Tensor counts = at::zeros({features, ranks + 1}, addresses.options());
  int64_t* out = counts.data_ptr<int64_t>();
  for (int64_t f = 0; f < features; ++f, out += ranks + 1) {
    const int64_t* first = address + offset[f];
    const int64_t size = offset[f + 1] - offset[f];
    if (ranks <= kFewRanks) {
      for (int64_t j = 0; j < ranks; ++j)
        out[j] = count_field(first, size, j == rank ? kLocal : j);
      out[ranks] = count_field(first, size, kReplica);
    } else {
      for (int64_t n = 0; n < size; ++n) {
        const int64_t field = first[n] >> kSlotBits;
        ++out[field == kLocal ? rank : field == kReplica ? ranks : field];
      }
    }
  }
  return counts;
}

at::Tensor count_sources_shape(const at::Tensor& addresses, const at::Tensor& segment_offset,
                               int64_t, int64_t ranks) {
  return at::zeros_symint({segment_offset.sym_numel() - 1, ranks + 1}, addresses.options());
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(oper, m) {
  m.def(
      "count_sources(Tensor addresses, Tensor segment_offset, int rank, int ranks) -> Tensor");
}

TORCH_LIBRARY_IMPL(oper, CPU, m) { m.impl("count_sources", count_sources); }
TORCH_LIBRARY_IMPL(oper, Meta, m) { m.impl("count_sources", count_sources_shape); }

}  // namespace oper
