// torch.ops.oper.find_classes, assign_groups and pack_codes: listed rows to classes, groups and
// codes.

#include "oper/plan/assign_rows.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <vector>

#include "cpu/common/arguments.h"
#include "cpu/common/parallel.h"
#include "oper/common/chunks.h"
#include "oper/common/count_hash_table.h"

namespace oper {
namespace {

constexpr int64_t kAssignedChunkRows = 1 << 18;

at::Tensor find_classes(const at::Tensor& accesses, const at::Tensor& samples_with_row,
                        const at::Tensor& offsets, const at::Tensor& entry_offset,
                        const at::Tensor& entry_accesses, const at::Tensor& entry_samples_with_row,
                        const at::Tensor& entry_class) {
  const int64_t tables = offsets.numel() - 1;
  check_size(tables, 0, kMostThings, "offsets: tables");
  const int64_t* first = elements<int64_t>(offsets, tables + 1, "offsets");
  const int64_t* entry_begin = elements<int64_t>(entry_offset, tables + 1, "entry_offset");
  check_offsets_from_zero(first, tables, "offsets", "table");
  check_offsets_from_zero(entry_begin, tables, "entry_offset", "table");
  const int64_t entries = entry_begin[tables];
  const int64_t* key_accesses = elements<int64_t>(entry_accesses, entries, "entry_accesses");
  const int64_t* key_samples_with_row =
      elements<int64_t>(entry_samples_with_row, entries, "entry_samples_with_row");
  const int64_t* key_class = elements<int64_t>(entry_class, entries, "entry_class");
  OPER_CHECK_VALUE(accesses.numel() == first[tables] && samples_with_row.numel() == first[tables],
                   "accesses, samples_with_row: expected ", first[tables], " rows, got ",
                   accesses.numel(), " and ", samples_with_row.numel());
  at::Tensor classes = at::empty({accesses.numel()}, at::kInt);
  int32_t* out = classes.data_ptr<int32_t>();
  const auto chunks = cut_chunks(first, tables, kAssignedChunkRows, 1);
  std::atomic<int64_t> unknown{-1};
  with_counter_type(accesses, "accesses", [&](auto zero) {
    using Counter = decltype(zero);
    check_same_type(samples_with_row, "samples_with_row", accesses, "accesses");
    check_contiguous(samples_with_row, "samples_with_row");
    const auto* a = static_cast<const Counter*>(accesses.const_data_ptr());
    const auto* c = static_cast<const Counter*>(samples_with_row.const_data_ptr());
    share_out(static_cast<int64_t>(chunks.size()), [&](const auto& next) {
      PairTable<int32_t> table;
      int64_t loaded = -1;
      for (int64_t n = next(); n >= 0; n = next()) {
        const int64_t t = chunks[n].range;
        if (t != loaded) {
          table.clear();
          for (int64_t e = entry_begin[t]; e < entry_begin[t + 1]; ++e)
            table.at(key_accesses[e], key_samples_with_row[e]) = static_cast<int32_t>(key_class[e]);
          loaded = t;
        }
        for (int64_t row = first[t] + chunks[n].begin; row < first[t] + chunks[n].end; ++row) {
          const int32_t* found = table.find(a[row], c[row]);
          if (!found) unknown = t;
          out[row] = found ? *found : -1;
        }
      }
    });
  });
  OPER_CHECK_VALUE(unknown < 0, "table number ", unknown.load(),
                   ": a row's counters are not among the entries given");
  return classes;
}

at::Tensor assign_groups(const at::Tensor& class_of_row, const at::Tensor& counts,
                         const at::Tensor& label) {
  OPER_CHECK_VALUE(counts.dim() == 2, "counts: expected [classes, groups], got ", counts.sizes());
  const int64_t classes = counts.size(0), groups = counts.size(1), rows = class_of_row.numel();
  check_size(groups, 0, kMostThings, "counts: groups");
  RoundRobin turns(elements<int64_t>(counts, classes * groups, "counts"), classes, groups);
  const int32_t* class_in = elements<int32_t>(class_of_row, "class_of_row");
  const int32_t* labels = elements<int32_t>(label, classes * groups, "label");
  at::Tensor group = at::empty({rows}, at::kInt);
  int32_t* out = group.data_ptr<int32_t>();
  for (int64_t row = 0; row < rows; ++row) {
    const int32_t c = class_in[row];
    check_index(c, classes, "class_of_row", "classes");
    const int32_t g = turns.next_group(c);
    OPER_CHECK_VALUE(g >= 0, "counts: class ", c, " has more rows than its groups take");
    out[row] = labels[c * groups + g];
  }
  return group;
}

// Codes are int32 where they fit unsigned, else int64, to be viewed as unsigned.
std::tuple<at::Tensor, at::Tensor> pack(const at::Tensor& group, int64_t groups) {
  const int64_t rows = group.numel();
  const int32_t* in = elements<int32_t>(group, "group");
  check_size(groups, 0, kMostThings, "groups");
  at::Tensor counts = at::zeros({groups}, at::kLong);
  int64_t* count = counts.data_ptr<int64_t>();
  int64_t most = 0;
  for (int64_t row = 0; row < rows; ++row) {
    check_index(in[row], groups, "group", "groups");
    most = std::max(most, ++count[in[row]]);
  }
  const RowCodes row_codes = RowCodes::of(groups);
  const bool narrow = row_codes.fit_32_bits(most);
  at::Tensor codes = at::empty({rows}, narrow ? at::kInt : at::kLong);
  std::vector<uint64_t> position(groups, 0);
  if (narrow)
    pack_codes(in, rows, row_codes, position.data(), static_cast<uint32_t*>(codes.data_ptr()));
  else
    pack_codes(in, rows, row_codes, position.data(), static_cast<uint64_t*>(codes.data_ptr()));
  return {codes, counts};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(oper, m) {
  m.def(
      "find_classes(Tensor accesses, Tensor samples_with_row, Tensor offsets, Tensor entry_offset,"
      " Tensor entry_accesses, Tensor entry_samples_with_row, Tensor entry_class) -> Tensor");
  m.def("assign_groups(Tensor class_of_row, Tensor counts, Tensor label) -> Tensor");
  m.def("pack_codes(Tensor group, int groups) -> (Tensor codes, Tensor rows)");
}

TORCH_LIBRARY_IMPL(oper, CPU, m) {
  m.impl("find_classes", find_classes);
  m.impl("assign_groups", assign_groups);
  m.impl("pack_codes", pack);
}

}  // namespace oper
