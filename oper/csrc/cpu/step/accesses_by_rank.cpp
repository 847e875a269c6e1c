// torch.ops.oper.accesses_by_rank: how many of a batch's accesses read from each rank.

#include "cpu/step/accesses_by_rank.h"

#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <algorithm>

#include "cpu/step/batch_arguments.h"
#include "oper/common/simd.h"
#include "oper/plan/address.h"
#include "schemas.h"

namespace oper {
namespace {

// A pass for each rank compares without a branch, and beats a histogram while ranks are few.
constexpr int64_t kFewRanks = 16;
// Addresses that stay in the first cache between two passes.
constexpr int64_t kCountedBlock = 1024;

OPER_SIMD int64_t count_field(const int64_t* addresses, int64_t size, uint64_t field) {
  int64_t count = 0;
  for (int64_t n = 0; n < size; ++n)
    count += static_cast<uint64_t>(addresses[n]) >> kSlotBits == field;
  return count;
}

}  // namespace

int64_t count_by_rank(const int64_t* addresses, int64_t size, int64_t rank, int64_t ranks,
                      int64_t* counts) {
  int64_t counted = 0;
  const auto add = [&](int64_t code, int64_t found) {
    counts[code] += found;
    counted += found;
  };
  if (ranks > kFewRanks) {
    for (int64_t n = 0; n < size; ++n) {
      const int64_t field = field_of(addresses[n]);
      const int64_t code = field == kReplica ? 0 : 1 + (field == kLocal ? rank : field);
      if (field >= 0 && code <= ranks) add(code, 1);
    }
    return counted;
  }
  for (int64_t begin = 0; begin < size; begin += kCountedBlock) {
    const int64_t* const block = addresses + begin;
    const int64_t length = std::min(kCountedBlock, size - begin);
    add(0, count_field(block, length, kReplica));
    for (int64_t j = 0; j < ranks; ++j)
      add(1 + j, count_field(block, length, j == rank ? kLocal : j));
  }
  return counted;
}

namespace {

at::Tensor accesses_by_rank(const at::Tensor& addresses, const at::Tensor& segment_offset,
                            const at::Tensor& features, int64_t buckets, int64_t rank,
                            int64_t ranks, int64_t /*stream*/,
                            const std::optional<at::Tensor>& /*report*/) {
  check_size(ranks, 1, kMostThings, "ranks");
  check_size(rank, 0, ranks - 1, "rank");
  check_size(buckets, 0, kMostThings / ranks, "buckets");
  const Features of = features_of(features, segment_offset);
  const int64_t* const address = elements<int64_t>(addresses, of.accesses(), "addresses");
  at::Tensor counts = at::zeros({buckets, ranks + 1}, addresses.options());
  for (int64_t f = 0; f < of.count; ++f) {
    OPER_CHECK_VALUE(of[f].bucket >= 0 && of[f].bucket < buckets, "features: number ", f,
                     " is of bucket ", of[f].bucket, ", and there are ", buckets);
    const int64_t size = of.end(f) - of.begin(f);
    int64_t* const of_bucket = counts.data_ptr<int64_t>() + of[f].bucket * (ranks + 1);
    OPER_CHECK_INDEX(count_by_rank(address + of.begin(f), size, rank, ranks, of_bucket) == size,
                     "addresses: one of feature ", f, " names none of ", ranks, " ranks");
  }
  return counts;
}

at::Tensor accesses_by_rank_shape(const at::Tensor& addresses, const at::Tensor&, const at::Tensor&,
                                  int64_t buckets, int64_t, int64_t ranks, int64_t,
                                  const std::optional<at::Tensor>&) {
  return at::zeros({buckets, ranks + 1}, addresses.options());
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(oper, m) { m.def(oper::schemas::kAccessesByRank); }

TORCH_LIBRARY_IMPL(oper, CPU, m) { m.impl("accesses_by_rank", accesses_by_rank); }
TORCH_LIBRARY_IMPL(oper, Meta, m) { m.impl("accesses_by_rank", accesses_by_rank_shape); }

}  // namespace oper
