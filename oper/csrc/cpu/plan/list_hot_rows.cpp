// torch.ops.oper.list_hot_rows and listed_and_striped_counts: which rows are listed one by one, and
// what the rest carries.

#include "oper/plan/list_hot_rows.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <cmath>
#include <optional>
#include <vector>

#include "cpu/common/parallel.h"
#include "cpu/common/row_counters.h"
#include "oper/common/chunks.h"

namespace oper {
namespace {

constexpr int64_t kListedChunkRows = 512 * kRowsPerLine;

// The first line of each table, and the number of lines.
std::vector<int64_t> line_offsets(const int64_t* offsets, int64_t tables) {
  std::vector<int64_t> lines(tables + 1, 0);
  for (int64_t t = 0; t < tables; ++t)
    lines[t + 1] = lines[t] + lines_of(offsets[t + 1] - offsets[t]);
  return lines;
}

at::Tensor to_tensor(const std::vector<int64_t>& values) {
  at::Tensor tensor = at::empty({static_cast<int64_t>(values.size())}, at::kLong);
  std::copy(values.begin(), values.end(), tensor.data_ptr<int64_t>());
  return tensor;
}

Line* lines_in(const at::Tensor& bitmap, int64_t lines) {
  OPER_CHECK_VALUE(bitmap.scalar_type() == at::kLong && bitmap.is_contiguous() &&
                       bitmap.numel() == lines * (kWordsPerLine + 1),
                   "bitmap: expected ", lines, " contiguous lines of 8 int64, got ", bitmap.numel(),
                   " elements of ", bitmap.scalar_type());
  return static_cast<Line*>(const_cast<void*>(bitmap.const_data_ptr()));
}

// Write the headers of all lines; returns the listed rows of all tables before each table, and
// of all.
std::vector<int64_t> number_lines(Line* lines, const std::vector<int64_t>& line_offset) {
  std::vector<int64_t> listed_offset;
  listed_offset.reserve(line_offset.size());
  int64_t before = 0, line = 0;
  for (int64_t first : line_offset) {
    for (; line < first; ++line) {
      lines[line].set_header(before);
      before += lines[line].listed();
    }
    listed_offset.push_back(before);
  }
  OPER_CHECK_VALUE(before < int64_t{1} << Line::kBeforeBits, before,
                   " rows are listed, and a bitmap numbers fewer than 2^", Line::kBeforeBits);
  return listed_offset;
}

// Checks that headers count the bits, as they tell where the counters of listed rows go.
void check_headers(const Line* lines, int64_t count, const char* name) {
  int64_t before = 0;
  for (int64_t line = 0; line < count; ++line) {
    OPER_CHECK_VALUE(lines[line].before() == before, name, ": the header of line ", line,
                     " does not count the bits before it; number it by number_bitmap");
    before += lines[line].listed();
  }
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> list_hot_rows(const at::Tensor& accesses,
                                                             const at::Tensor& offsets,
                                                             const at::Tensor& cut,
                                                             const at::Tensor& quota) {
  const int64_t tables = offsets.numel() - 1;
  check_size(tables, 0, kMostThings, "offsets: tables");
  const int64_t* first_row = elements<int64_t>(offsets, tables + 1, "offsets");
  check_offsets_within(first_row, tables, accesses.numel(), "offsets", "counters");
  const int64_t* cuts = elements<int64_t>(cut, tables, "cut");
  const int64_t* quotas = elements<int64_t>(quota, tables, "quota");
  const auto line_offset = line_offsets(first_row, tables);
  at::Tensor bitmap = at::zeros({line_offset.back(), kWordsPerLine + 1}, at::kLong);
  Line* lines = lines_in(bitmap, line_offset.back());
  const auto chunks = cut_chunks(first_row, tables, kListedChunkRows, kRowsPerLine);
  const auto chunk_lines = [&](const Chunk& chunk) {
    return lines + line_offset[chunk.range] + chunk.begin / kRowsPerLine;
  };
  with_counter_type(accesses, "accesses", [&](auto zero) {
    using Counter = decltype(zero);
    const auto* counters = static_cast<const Counter*>(accesses.const_data_ptr());
    const auto chunk_counters = [&](const Chunk& chunk) {
      return counters + first_row[chunk.range] + chunk.begin;
    };
    std::vector<Marked> marked(chunks.size());
    const auto size = static_cast<int64_t>(chunks.size());
    share_out(size, [&](const auto& next) {
      for (int64_t n = next(); n >= 0; n = next())
        marked[n] = mark_above(chunk_counters(chunks[n]), chunks[n].end - chunks[n].begin,
                               cuts[chunks[n].range], chunk_lines(chunks[n]));
    });
    // The quota at the cut goes to a table's first chunks; few are read again.
    std::vector<int64_t> left(quotas, quotas + tables), share(chunks.size());
    for (size_t n = 0; n < chunks.size(); ++n) {
      share[n] = std::min(left[chunks[n].range], marked[n].equal);
      left[chunks[n].range] -= share[n];
    }
    share_out(size, [&](const auto& next) {
      for (int64_t n = next(); n >= 0; n = next())
        if (share[n] > 0)
          mark_equal(chunk_counters(chunks[n]), chunks[n].end - chunks[n].begin,
                     cuts[chunks[n].range], share[n], chunk_lines(chunks[n]));
    });
  });
  const auto listed_offset = number_lines(lines, line_offset);
  return {bitmap, to_tensor(line_offset), to_tensor(listed_offset)};
}

at::Tensor number_bitmap(const at::Tensor& bitmap, const at::Tensor& line_offset) {
  const int64_t tables = line_offset.numel() - 1;
  check_size(tables, 0, kMostThings, "line_offset: tables");
  const int64_t* first = elements<int64_t>(line_offset, tables + 1, "line_offset");
  check_offsets_from_zero(first, tables, "line_offset", "table");
  check_size(first[tables], 0, kMostRows, "line_offset: lines");
  return to_tensor(number_lines(lines_in(bitmap, first[tables]), {first, first + tables + 1}));
}

// Checks that patterns have steps, all of them ranks.
void check_patterns(const int64_t* begin, int64_t patterns, const int32_t* order, int64_t ranks) {
  for (int64_t p = 0; p < patterns; ++p)
    OPER_CHECK_VALUE(begin[p] < begin[p + 1], "order_offset: pattern ", p, " has no steps");
  for (int64_t n = 0; n < begin[patterns]; ++n) check_index(order[n], ranks, "order", "ranks");
}

using Counts = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

Counts listed_and_striped_counts(
    const at::Tensor& accesses, const at::Tensor& samples_with_row, const at::Tensor& offsets,
    const at::Tensor& samples_with_row_offsets, const at::Tensor& bitmap,
    const std::optional<at::Tensor>& stripe_bitmap, const at::Tensor& order,
    const at::Tensor& order_offset, const at::Tensor& pattern_of, const at::Tensor& rotation,
    int64_t ranks, const at::Tensor& entry_offset, const at::Tensor& entry_samples_with_row,
    const at::Tensor& entry_touched, const at::Tensor& entry_weight) {
  const int64_t tables = offsets.numel() - 1;
  check_size(tables, 0, kMostThings, "offsets: tables");
  check_size(ranks, 1, kMostThings, "ranks");
  const int64_t* first_row = elements<int64_t>(offsets, tables + 1, "offsets");
  check_offsets_within(first_row, tables, accesses.numel(), "offsets", "counters");
  const auto line_offset = line_offsets(first_row, tables);
  const Line* lines = lines_in(bitmap, line_offset.back());
  const Line* stripe_lines = stripe_bitmap ? lines_in(*stripe_bitmap, line_offset.back()) : lines;
  const int64_t* order_begin =
      elements<int64_t>(order_offset, order_offset.numel(), "order_offset");
  const int64_t* pattern = elements<int64_t>(pattern_of, tables, "pattern_of");
  const int64_t* enter = elements<int64_t>(rotation, tables, "rotation");
  const int64_t* entry_begin = elements<int64_t>(entry_offset, tables + 1, "entry_offset");
  check_offsets_from_zero(entry_begin, tables, "entry_offset", "table");
  const int64_t* entries =
      elements<int64_t>(entry_samples_with_row, entry_begin[tables], "entry_samples_with_row");
  const double* touched = elements<double>(entry_touched, entry_begin[tables], "entry_touched");
  const double* weight = elements<double>(entry_weight, entry_begin[tables], "entry_weight");
  check_offsets_from_zero(order_begin, order_offset.numel() - 1, "order_offset", "pattern");
  const int32_t* ranks_in_order =
      elements<int32_t>(order, order_begin[order_offset.numel() - 1], "order");
  check_patterns(order_begin, order_offset.numel() - 1, ranks_in_order, ranks);
  for (int64_t t = 0; t < tables; ++t) {
    check_index(pattern[t], order_offset.numel() - 1, "pattern_of", "patterns");
    check_index(enter[t], order_begin[pattern[t] + 1] - order_begin[pattern[t]], "rotation",
                "steps of its pattern");
    bool ascending = entry_begin[t] == entry_begin[t + 1] || entries[entry_begin[t]] >= 0;
    for (int64_t n = entry_begin[t] + 1; n < entry_begin[t + 1]; ++n)
      ascending &= entries[n - 1] <= entries[n];
    OPER_CHECK_VALUE(ascending, "entry_samples_with_row: must ascend from 0 or more in table ", t);
  }
  check_headers(lines, line_offset.back(), "bitmap");
  if (stripe_bitmap) check_headers(stripe_lines, line_offset.back(), "stripe_bitmap");

  int64_t listed = 0;
  if (line_offset.back() > 0) {
    const Line& last = lines[line_offset.back() - 1];
    listed = last.before() + last.listed();
  }
  // Chunk sums are kept apart and added in order, so that floats do not depend on the threads.
  const auto chunks = cut_chunks(first_row, tables, kListedChunkRows, kRowsPerLine);
  std::vector<StripeSum> sums(chunks.size() * ranks);
  std::vector<int64_t> rows(chunks.size() * ranks);
  at::Tensor listed_accesses = at::empty({listed}, accesses.options());
  at::Tensor listed_samples_with_row =
      at::empty({samples_with_row.numel() ? listed : 0}, accesses.options());
  with_counter_type(accesses, "accesses", [&](auto zero) {
    using Counter = decltype(zero);
    const auto counters =
        row_counters<Counter>(accesses, samples_with_row, offsets, samples_with_row_offsets);
    auto* accesses_out = static_cast<Counter*>(listed_accesses.data_ptr());
    auto* samples_with_row_out = samples_with_row.numel()
                                     ? static_cast<Counter*>(listed_samples_with_row.data_ptr())
                                     : nullptr;
    share_out(static_cast<int64_t>(chunks.size()), [&](const auto& next) {
      for (int64_t n = next(); n >= 0; n = next()) {
        const Chunk& chunk = chunks[n];
        const int64_t t = chunk.range, line = line_offset[t] + chunk.begin / kRowsPerLine;
        const int64_t stripe_first = stripe_lines[line_offset[t]].before();
        const Counter* samples = counters.samples_with_row_of(t);
        const ScanTask<Counter> task{
            counters.accesses_of(t) + chunk.begin,
            samples ? samples + chunk.begin : nullptr,
            chunk.end - chunk.begin,
            lines + line,
            stripe_lines + line,
            chunk.begin - (stripe_lines[line].before() - stripe_first),
        };
        const int64_t begin = order_begin[pattern[t]], end = order_begin[pattern[t] + 1];
        const int64_t before = lines[line].before();
        copy_and_sum(task, Pattern{ranks_in_order + begin, end - begin, enter[t]},
                     ValuesOfSamples(entries + entry_begin[t], touched + entry_begin[t],
                                     weight + entry_begin[t], entry_begin[t + 1] - entry_begin[t]),
                     accesses_out + before,
                     samples_with_row_out ? samples_with_row_out + before : nullptr,
                     sums.data() + n * ranks, rows.data() + n * ranks);
      }
    });
  });

  at::Tensor striped_rows = at::zeros({tables, ranks}, at::kLong);
  at::Tensor striped_accesses = at::zeros({tables, ranks}, at::kLong);
  at::Tensor striped_expected = at::zeros({tables, ranks}, at::kDouble);
  at::Tensor striped_touched = at::zeros({tables, ranks}, at::kDouble);
  for (size_t n = 0; n < chunks.size(); ++n) {
    const int64_t to = chunks[n].range * ranks;
    for (int64_t r = 0; r < ranks; ++r) {
      const StripeSum& sum = sums[n * ranks + r];
      striped_rows.data_ptr<int64_t>()[to + r] += rows[n * ranks + r];
      striped_accesses.data_ptr<int64_t>()[to + r] += sum.accesses;
      striped_expected.data_ptr<double>()[to + r] += sum.expected;
      striped_touched.data_ptr<double>()[to + r] += sum.touched;
      OPER_CHECK_VALUE(!std::isnan(sum.touched), "table number ", chunks[n].range,
                       ": a row's samples with it are not among the entries given");
    }
  }
  return {listed_accesses,  listed_samples_with_row, striped_rows,
          striped_accesses, striped_expected,        striped_touched};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(oper, m) {
  m.def(
      "list_hot_rows(Tensor accesses, Tensor offsets, Tensor cut, Tensor quota)"
      " -> (Tensor bitmap, Tensor line_offset, Tensor listed_offset)");
  m.def("number_bitmap(Tensor(a!) bitmap, Tensor line_offset) -> Tensor listed_offset");
  m.def(
      "listed_and_striped_counts(Tensor accesses, Tensor samples_with_row, Tensor offsets, Tensor "
      "samples_with_row_offsets,"
      " Tensor bitmap, Tensor? stripe_bitmap, Tensor order, Tensor order_offset,"
      " Tensor pattern_of, Tensor rotation, int ranks, Tensor entry_offset,"
      " Tensor entry_samples_with_row, Tensor entry_touched, Tensor entry_weight)"
      " -> (Tensor listed_accesses, Tensor listed_samples_with_row, Tensor striped_rows,"
      " Tensor striped_accesses, Tensor striped_expected, Tensor striped_touched)");
}

TORCH_LIBRARY_IMPL(oper, CPU, m) {
  m.impl("list_hot_rows", list_hot_rows);
  m.impl("number_bitmap", number_bitmap);
  m.impl("listed_and_striped_counts", listed_and_striped_counts);
}

}  // namespace oper
