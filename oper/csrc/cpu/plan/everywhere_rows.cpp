// torch.ops.oper.largest_in_order and mark_rows: listed rows that need no code of their own.

#include "oper/plan/everywhere_rows.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros_like.h>
#include <torch/library.h>

#include <algorithm>
#include <type_traits>
#include <vector>

#include "cpu/common/arguments.h"

namespace oper {
namespace {

struct Listed {
  const int64_t* first;  // [tables + 1] first listed row of each table
  int64_t tables;
};

Listed listed_rows(const at::Tensor& codes, const at::Tensor& listed_offset) {
  const int64_t tables = listed_offset.numel() - 1;
  const Listed listed{elements<int64_t>(listed_offset, tables + 1, "listed_offset"), tables};
  check_contiguous(codes, "codes");
  check_offsets_from_zero(listed.first, tables, "listed_offset", "table");
  OPER_CHECK_VALUE(listed.first[tables] == codes.numel(), "listed_offset: must go from 0 to the ",
                   codes.numel(), " codes");
  return listed;
}

RowCodes codes_of_groups(const at::Tensor& codes, int64_t groups) {
  check_size(groups, 0, kMostThings, "groups");
  OPER_CHECK_VALUE(groups > 0 || codes.numel() == 0, "groups: there are codes and no groups");
  return RowCodes::of(groups);
}

// f(codes as unsigned integers).
template <typename F>
auto with_codes(const at::Tensor& codes, const F& f) {
  return with_index_type(codes.scalar_type(), "codes", [&](auto code) {
    using Code = std::make_unsigned_t<decltype(code)>;
    return f(static_cast<const Code*>(codes.const_data_ptr()));
  });
}

std::tuple<at::Tensor, at::Tensor> largest(const at::Tensor& codes, const at::Tensor& listed_offset,
                                           const at::Tensor& wanted) {
  const Listed listed = listed_rows(codes, listed_offset);
  const int64_t groups = wanted.numel();
  const RowCodes row_codes = codes_of_groups(codes, groups);
  const bool* flags = elements<bool>(wanted, "wanted");
  // There are as many as codes can name, so that none leads beyond them.
  std::vector<uint8_t> asked(size_t{1} << row_codes.group_bits, 0);
  std::copy(flags, flags + groups, asked.begin());
  at::Tensor group = at::empty({listed.tables}, at::kLong);
  at::Tensor rows = at::empty({listed.tables}, at::kLong);
  with_codes(codes, [&](const auto* code) {
    for (int64_t t = 0; t < listed.tables; ++t) {
      const int64_t begin = listed.first[t];
      const InOrder found =
          largest_in_order(code + begin, listed.first[t + 1] - begin, row_codes, asked);
      group.data_ptr<int64_t>()[t] = found.group;
      rows.data_ptr<int64_t>()[t] = found.rows;
    }
  });
  return {group, rows};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> mark(const at::Tensor& codes, int64_t groups,
                                                    const at::Tensor& bitmap,
                                                    const at::Tensor& line_offset,
                                                    const at::Tensor& group) {
  check_contiguous(codes, "codes");
  const RowCodes row_codes = codes_of_groups(codes, groups);
  const int64_t tables = line_offset.numel() - 1;
  const int64_t* first_line = elements<int64_t>(line_offset, tables + 1, "line_offset");
  check_offsets_from_zero(first_line, tables, "line_offset", "table");
  const int64_t lines = first_line[tables];
  const auto* const line = reinterpret_cast<const Line*>(
      elements<int64_t>(bitmap, product(lines, kWordsPerLine + 1, "bitmap"), "bitmap"));
  const int64_t* marked = elements<int64_t>(group, tables, "group");
  std::vector<int64_t> listed(tables, 0);
  int64_t all = 0;
  for (int64_t t = 0; t < tables; ++t) {
    for (int64_t n = first_line[t]; n < first_line[t + 1]; ++n) listed[t] += line[n].listed();
    all += listed[t];
  }
  OPER_CHECK_VALUE(all == codes.numel(), "codes: ", codes.numel(), ", and the bitmap lists ", all,
                   " rows");
  at::Tensor marks = at::zeros_like(bitmap);
  Line* const mark = static_cast<Line*>(marks.data_ptr());
  at::Tensor first = at::empty({tables}, at::kLong);
  at::Tensor rest = at::empty_like(codes);
  const int64_t left = with_codes(codes, [&](const auto* code) {
    using Code = std::remove_const_t<std::remove_pointer_t<decltype(code)>>;
    Code* const out = static_cast<Code*>(rest.data_ptr());
    Code* end = out;
    for (int64_t t = 0; t < tables; ++t) {
      const int64_t at = first_line[t];
      first.data_ptr<int64_t>()[t] =
          mark_rows(code, line + at, first_line[t + 1] - at, row_codes, marked[t], mark + at, end);
      code += listed[t];
    }
    return static_cast<int64_t>(end - out);
  });
  int64_t before = 0;
  for (int64_t n = 0; n < lines; ++n) {
    mark[n].set_header(before);
    before += mark[n].listed();
  }
  return {rest.slice(0, 0, left).clone(), marks, first};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(oper, m) {
  m.def(
      "largest_in_order(Tensor codes, Tensor listed_offset, Tensor wanted)"
      " -> (Tensor group, Tensor rows)");
  m.def(
      "mark_rows(Tensor codes, int groups, Tensor bitmap, Tensor line_offset, Tensor group)"
      " -> (Tensor codes, Tensor bitmap, Tensor first)");
}

TORCH_LIBRARY_IMPL(oper, CPU, m) {
  m.impl("largest_in_order", largest);
  m.impl("mark_rows", mark);
}

}  // namespace oper
