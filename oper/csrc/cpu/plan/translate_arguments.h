// The arguments of a translation, checked.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <optional>

#include "cpu/common/arguments.h"
#include "oper/plan/translate.h"

namespace oper {

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
                        bitmap.numel() % (kWordsPerLine + 1) == 0,
                    "bitmap: contiguous lines of 8 int64 were needed");
  return static_cast<const Line*>(bitmap.const_data_ptr());
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
