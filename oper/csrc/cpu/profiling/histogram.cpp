// torch.ops.oper.histogram: rows of each (range, accesses, samples with it), all cores.

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
      const Counter* samples_with_row = counters.samples_with_row_of(chunk.range);
      mine.count(counters.accesses_of(chunk.range) + chunk.begin,
                 samples_with_row ? samples_with_row + chunk.begin : nullptr,
                 chunk.end - chunk.begin);
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
  auto* samples_with_row = std::get<2>(result).data_ptr<int64_t>();
  auto* rows = std::get<3>(result).data_ptr<int64_t>();
  for (size_t n = 0; n < totals.size(); ++n) {
    for (const auto& entry : sorted_entries(totals[n])) {
      *range++ = static_cast<int64_t>(n);
      *accesses++ = static_cast<int64_t>(entry.accesses);
      *samples_with_row++ = static_cast<int64_t>(entry.samples_with_row);
      *rows++ = entry.value;
    }
  }
  return result;
}

Result histogram(const at::Tensor& accesses, const at::Tensor& samples_with_row,
                 const at::Tensor& offsets, const at::Tensor& samples_with_row_offsets) {
  return with_counter_type(accesses, "accesses", [&](auto zero) {
    using Counter = decltype(zero);
    const auto counters =
        row_counters<Counter>(accesses, samples_with_row, offsets, samples_with_row_offsets);
    return to_tensors(count_ranges(counters, offsets.numel() - 1));
  });
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(oper, m) {
  m.def(
      "histogram(Tensor accesses, Tensor samples_with_row, Tensor offsets, Tensor "
      "samples_with_row_offsets)"
      " -> (Tensor range, Tensor accesses, Tensor samples_with_row, Tensor rows)");
}

TORCH_LIBRARY_IMPL(oper, CPU, m) { m.impl("histogram", histogram); }

}  // namespace oper
