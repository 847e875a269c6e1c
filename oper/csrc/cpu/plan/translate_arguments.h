// The arguments of a translation, checked.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <optional>

#include "cpu/common/arguments.h"
#include "oper/plan/translate.h"

namespace oper {

constexpr int64_t kLineWords = kWordsPerLine + 1;

struct Segments {
  const int64_t* offsets;
  const int64_t* table;
  int64_t count;
};

inline Segments segments_of(const at::Tensor& ids, const at::Tensor& offsets,
                            const at::Tensor& table, int64_t tables) {
  const int64_t count = table.numel();
  const Segments segments{elements<int64_t>(offsets, count + 1, "segment_offset"),
                          elements<int64_t>(table, count, "segment_table"), count};
  check_contiguous(ids, "ids");
  check_offsets_from_zero(segments.offsets, count, "segment_offset", "segment");
  OPER_CHECK_VALUE(segments.offsets[count] == ids.numel(), "segment_offset: must go from 0 to the ",
                   ids.numel(), " ids");
  for (int64_t s = 0; s < count; ++s)
    check_index(segments.table[s], tables, "segment_table", "tables");
  return segments;
}

inline const Line* lines_of_bitmap(const at::Tensor& bitmap) {
  OPER_CHECK_VALUE(bitmap.scalar_type() == at::kLong && bitmap.is_contiguous() &&
                       bitmap.numel() % kLineWords == 0,
                   "bitmap: expected contiguous lines of 8 int64, got ", bitmap.numel(),
                   " elements of ", bitmap.scalar_type());
  return static_cast<const Line*>(bitmap.const_data_ptr());
}

// Checks that the parts of the map of the segments' tables are within the arrays that they point
// into. What these hold is vouched for (cpu/common/arguments.h).
inline void check_tables(const Segments& segments, const TableMap* tables, const at::Tensor& bitmap,
                         const std::optional<at::Tensor>& stripe_bitmap,
                         const std::optional<at::Tensor>& everywhere_bitmap, int64_t steps,
                         const at::Tensor& stripe_base, int64_t flat) {
  const auto within = [](int64_t first, int64_t size, int64_t all) {
    return first >= 0 && size >= 0 && size <= all && first <= all - size;
  };
  const Line* const numbering = lines_of_bitmap(stripe_bitmap ? *stripe_bitmap : bitmap);
  const int64_t lines = bitmap.numel() / kLineWords;
  OPER_CHECK_VALUE(!stripe_bitmap || stripe_bitmap->numel() == bitmap.numel(),
                   "stripe_bitmap: must have as many lines as the bitmap, ", lines);
  OPER_CHECK_VALUE(!everywhere_bitmap || everywhere_bitmap->numel() == bitmap.numel(),
                   "everywhere_bitmap: must have as many lines as the bitmap, ", lines);
  OPER_CHECK_VALUE(stripe_base.dim() == 2, "stripe_base: expected [tables, ranks], got ",
                   stripe_base.sizes());
  for (int64_t s = 0; s < segments.count; ++s) {
    if (segments.offsets[s] == segments.offsets[s + 1]) continue;
    const TableMap& table = tables[segments.table[s]];
    if (table.rows == 0) continue;  // has no id in range
    const bool fits = table.rows > 0 && table.rows <= kMostRows && table.flat >= -1 &&
                      (table.flat < 0 || within(table.flat, table.rows, flat)) &&
                      within(table.first_line, lines_of(table.rows), lines) && table.period >= 2 &&
                      within(table.pattern, table.period, steps) &&
                      table.reciprocal == ~uint64_t{0} / static_cast<uint64_t>(table.period) + 1 &&
                      within(table.stripe_base, stripe_base.size(1), stripe_base.numel()) &&
                      within(table.origin - numbering[table.first_line].before(), 1, kMostRows);
    OPER_CHECK_VALUE(fits, "tables: number ", segments.table[s],
                     " goes beyond the bitmap, the steps, the stripe bases or the plain addresses");
  }
}

template <typename Code>
MapView<Code> map_of(const TableMap* tables, const at::Tensor& bitmap,
                     const std::optional<at::Tensor>& stripe_bitmap,
                     const std::optional<at::Tensor>& everywhere_bitmap, const at::Tensor& codes,
                     int64_t group_bits, const at::Tensor& group_base,
                     const at::Tensor& stripe_base, const at::Tensor& steps,
                     const at::Tensor& flat) {
  return {
      tables,
      lines_of_bitmap(bitmap),
      stripe_bitmap ? lines_of_bitmap(*stripe_bitmap) : nullptr,
      everywhere_bitmap ? lines_of_bitmap(*everywhere_bitmap) : nullptr,
      static_cast<const Code*>(codes.const_data_ptr()),
      RowCodes{static_cast<int>(group_bits)},
      elements<int64_t>(group_base, "group_base"),
      elements<int64_t>(stripe_base, "stripe_base"),
      structs<PatternStep>(steps, "steps"),
      elements<int64_t>(flat, "flat"),
  };
}

}  // namespace oper
