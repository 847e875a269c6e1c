// torch.ops.oper.translate: row ids of many tables to addresses.
//
// Ids come in segments, segment s being ids [offsets[s], offsets[s+1]) of table segment_table[s],
// as the features of a KeyedJaggedTensor lie one after the other. `stream` is a device's
// (device/translate.cpp).

#include "oper/plan/translate.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include <algorithm>
#include <optional>

#include "cpu/common/output_buffers.h"
#include "cpu/plan/translate_arguments.h"
#include "schemas.h"

namespace oper {
namespace {

constexpr int64_t kIdsPerTask = 1 << 15;

// f(table, begin, size) for every piece of a segment, on all cores; it returns the index of the
// first id out of the table's range, or -1.
template <typename F>
void for_each_piece(const Segments& segments, int64_t ids, const F& f) {
  at::parallel_for(0, ids, kIdsPerTask, [&](int64_t begin, int64_t end) {
    const int64_t* last = segments.offsets + segments.count + 1;
    int64_t s = std::upper_bound(segments.offsets, last, begin) - segments.offsets - 1;
    while (begin < end) {
      const int64_t stop = std::min(end, segments.offsets[s + 1]);
      const int64_t bad = f(segments.table[s], begin, stop - begin);
      OPER_CHECK_INDEX(bad < 0, "id number ", begin + bad, ", of table number ", segments.table[s],
                       ", is out of the table's range");
      begin = stop;
      ++s;
    }
  });
}

at::Tensor addresses_like(const at::Tensor& ids) {
  return at::empty_like(ids, ids.options().dtype(at::kLong));
}

at::Tensor translate(const at::Tensor& ids, const at::Tensor& segment_offset,
                     const at::Tensor& segment_table, const at::Tensor& tables,
                     const at::Tensor& bitmap, const std::optional<at::Tensor>& stripe_bitmap,
                     const std::optional<at::Tensor>& everywhere_bitmap, const at::Tensor& codes,
                     int64_t group_bits, const at::Tensor& group_base,
                     const at::Tensor& stripe_base, const at::Tensor& steps, const at::Tensor& flat,
                     int64_t, const std::optional<at::Tensor>&) {
  const auto* const table_maps = structs<TableMap>(tables, "tables");
  const Segments segments = segments_of(ids, segment_offset, segment_table, tables.size(0));
  check_contiguous(codes, "codes");
  check_size(group_bits, 0, 31, "group_bits");
  OPER_CHECK_VALUE(group_base.numel() > 0 || codes.numel() == 0, "group_base: is empty");
  check_tables(segments, table_maps, bitmap, stripe_bitmap, everywhere_bitmap, steps.size(0),
               stripe_base, flat.numel());
  at::Tensor out = pooled_tensor(ids.numel(), at::kLong).view(ids.sizes());
  int64_t* const to = out.data_ptr<int64_t>();
  with_index_type(codes.scalar_type(), "codes", [&](auto code) {
    using Code = std::make_unsigned_t<decltype(code)>;
    const auto map = map_of<Code>(table_maps, bitmap, stripe_bitmap, everywhere_bitmap, codes,
                                  group_bits, group_base, stripe_base, steps, flat);
    with_index_type(ids.scalar_type(), "ids", [&](auto id) {
      const auto* const in = ids.const_data_ptr<decltype(id)>();
      for_each_piece(segments, ids.numel(), [&](int64_t table, int64_t begin, int64_t size) {
        return translate_table(map, map.tables[table], in + begin, size, to + begin);
      });
    });
  });
  return out;
}

at::Tensor translate_shape(const at::Tensor& ids, const at::Tensor&, const at::Tensor&,
                           const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&,
                           const std::optional<at::Tensor>&, const at::Tensor&, int64_t,
                           const at::Tensor&, const at::Tensor&, const at::Tensor&,
                           const at::Tensor&, int64_t, const std::optional<at::Tensor>&) {
  return addresses_like(ids);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(oper, m) { m.def(oper::schemas::kTranslate); }

TORCH_LIBRARY_IMPL(oper, CPU, m) { m.impl("translate", translate); }

TORCH_LIBRARY_IMPL(oper, Meta, m) { m.impl("translate", translate_shape); }

}  // namespace oper
