// torch.ops.oper.histogram: rows of each (range, accesses, containing), all cores.

#include "oper/profiling/histogram.h"

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <mutex>
#include <vector>

#include "cpu/common/parallel.h"
#include "cpu/common/row_counters.h"
#include "oper/common/chunks.h"

namespace oper {
namespace {

constexpr int64_t kChunkRows = 1 << 20;

using Result = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

template <typename Counter>
std::vector<PairCounts> count_ranges(const RowCounters<Counter>& counters, int64_t ranges) {
  const auto chunks = cut_chunks(counters.offsets, ranges, kChunkRows, 1);
  std::vector<PairCounts> totals(ranges);
  std::vector<std::mutex> locks(ranges);
  share_out(static_cast<int64_t>(chunks.size()), [&](const auto& next) {
    ChunkHistogram<Counter> mine;
    for (int64_t task = next(); task >= 0; task = next()) {
      const Chunk& chunk = chunks[task];
      const Counter* containing = counters.containing_of(chunk.range);
      mine.count(counters.accesses_of(chunk.range) + chunk.begin,
                 containing ? containing + chunk.begin : nullptr, chunk.end - chunk.begin);
      const std::lock_guard<std::mutex> hold(locks[chunk.range]);
      mine.drain(totals[chunk.range]);
    }
  });
  return totals;
}

Result to_tensors(const std::vector<PairCounts>& totals) {
  int64_t size = 0;
  for (const auto& total : totals) size += static_cast<int64_t>(total.size());
  const auto make = [&] { return at::empty({size}, at::kLong); };
  Result result{make(), make(), make(), make()};
  auto* range = std::get<0>(result).data_ptr<int64_t>();
  auto* accesses = std::get<1>(result).data_ptr<int64_t>();
  auto* containing = std::get<2>(result).data_ptr<int64_t>();
  auto* rows = std::get<3>(result).data_ptr<int64_t>();
  for (size_t n = 0; n < totals.size(); ++n) {
    for (const auto& entry : sorted_entries(totals[n])) {
      *range++ = static_cast<int64_t>(n);
      *accesses++ = static_cast<int64_t>(entry.accesses);
      *containing++ = static_cast<int64_t>(entry.containing);
      *rows++ = entry.value;
    }
  }
  return result;
}

Result histogram(const at::Tensor& accesses, const at::Tensor& containing,
                 const at::Tensor& offsets, const at::Tensor& containing_offsets) {
  return with_counter_type(accesses, "accesses", [&](auto zero) {
    using Counter = decltype(zero);
    const auto counters = row_counters<Counter>(accesses, containing, offsets, containing_offsets);
    return to_tensors(count_ranges(counters, offsets.numel() - 1));
  });
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(oper, m) {
  m.def(
      "histogram(Tensor accesses, Tensor containing, Tensor offsets, Tensor containing_offsets)"
      " -> (Tensor range, Tensor accesses, Tensor containing, Tensor rows)");
}

TORCH_LIBRARY_IMPL(oper, CPU, m) { m.impl("histogram", histogram); }

}  // namespace oper
