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
  TORCH_CHECK_VALUE(segments.offsets[count] == ids.numel(),
                    "segment_offset: must go from 0 to the ", ids.numel(), " ids");
  for (int64_t s = 0; s < count; ++s)
    check_index(segments.table[s], tables, "segment_table", "tables");
  return segments;
}

inline const Line* lines_of_bitmap(const at::Tensor& bitmap) {
  TORCH_CHECK_VALUE(bitmap.scalar_type() == at::kLong && bitmap.is_contiguous() &&
                        bitmap.numel() % kLineWords == 0,
                    "bitmap: contiguous lines of 8 int64 were needed");
  return static_cast<const Line*>(bitmap.const_data_ptr());
}

// That a table's part of the map is within the arrays it points into. What these hold is vouched
// for (cpu/common/arguments.h).
inline void check_table(const TableMap& table, int64_t number, int64_t lines, int64_t steps,
                        int64_t stripe_bases, int64_t flat) {
  const auto within = [](int64_t first, int64_t size, int64_t all) {
    return first >= 0 && size >= 0 && size <= all && first <= all - size;
  };
  const bool has_rows = table.rows >= 0 && table.rows <= kMostRows;
  const bool listed = has_rows && within(table.first_line, lines_of(table.rows), lines);
  const bool striped = table.period >= 2 && within(table.pattern, table.period, steps) &&
                       within(table.stripe_base, 1, stripe_bases) && table.origin >= 0 &&
                       table.origin <= 2 * kMostRows &&
                       table.reciprocal == ~uint64_t{0} / static_cast<uint64_t>(table.period) + 1;
  const bool plain = table.flat == -1 || (has_rows && within(table.flat, table.rows, flat));
  TORCH_CHECK_VALUE((listed && striped && plain) || table.rows == 0, "tables: number ", number,
                    " goes beyond the bitmap, the steps, the stripe bases or the plain addresses");
}

template <typename Code>
MapView<Code> map_of(const TableMap* tables, const at::Tensor& bitmap,
                     const std::optional<at::Tensor>& stripe_bitmap, const at::Tensor& codes,
                     int64_t group_bits, const at::Tensor& group_base,
                     const at::Tensor& stripe_base, const at::Tensor& steps,
                     const at::Tensor& flat) {
  return {
      tables,
      lines_of_bitmap(bitmap),
      stripe_bitmap ? lines_of_bitmap(*stripe_bitmap) : nullptr,
      static_cast<const Code*>(codes.const_data_ptr()),
      RowCodes{static_cast<int>(group_bits)},
      elements<int64_t>(group_base, "group_base"),
      elements<int64_t>(stripe_base, "stripe_base"),
      structs<PatternStep>(steps, "steps"),
      elements<int64_t>(flat, "flat"),
  };
}

}  // namespace oper
