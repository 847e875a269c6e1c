// torch.ops.oper.translate on a device.

#include <ATen/ops/empty_like.h>
#include <ATen/ops/full.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <optional>

#include "cpu/common/arguments.h"
#include "cpu/plan/translate_arguments.h"
#include "device/library.h"
#include "schemas.h"

namespace oper {
namespace {

// The map is on the ids' device. Without a report the segments are in host memory, where they are
// checked, and the host waits for the ids' check; with one they are the device's, and it does not.
at::Tensor translate(const at::Tensor& ids, const at::Tensor& segment_offset,
                     const at::Tensor& segment_table, const at::Tensor& tables,
                     const at::Tensor& bitmap, const std::optional<at::Tensor>& stripe_bitmap,
                     const std::optional<at::Tensor>& everywhere_bitmap, const at::Tensor& codes,
                     int64_t group_bits, const at::Tensor& group_base,
                     const at::Tensor& stripe_base, const at::Tensor& steps, const at::Tensor& flat,
                     int64_t stream, const std::optional<at::Tensor>& report) {
  const c10::DeviceGuard guard(ids.device());
  const auto* const table_maps = structs<TableMap>(tables, "tables");
  if (!report) segments_of(ids, segment_offset, segment_table, tables.size(0));
  OPER_CHECK_VALUE(segment_table.numel() > 0 || ids.numel() == 0, "segment_table: is empty");
  OPER_CHECK_VALUE(segment_offset.numel() == segment_table.numel() + 1,
                   "segment_offset: ", segment_offset.numel(), " elements for ",
                   segment_table.numel(), " segments");
  const at::Tensor offset = segment_offset.to(ids.device());
  const at::Tensor table = segment_table.to(ids.device());
  check_contiguous(codes, "codes");
  at::Tensor out = at::empty_like(ids, ids.options().dtype(at::kLong));
  const at::Tensor found = report ? *report : at::full({2}, -1, ids.options().dtype(at::kLong));
  with_index_type(codes.scalar_type(), "codes", [&](auto code) {
    using Code = std::make_unsigned_t<decltype(code)>;
    with_index_type(ids.scalar_type(), "ids", [&](auto id) {
      const TranslateArguments<decltype(id), Code> a{
          map_of<Code>(table_maps, bitmap, stripe_bitmap, everywhere_bitmap, codes, group_bits,
                       group_base, stripe_base, steps, flat),
          ids.const_data_ptr<decltype(id)>(),
          ids.numel(),
          offset.const_data_ptr<int64_t>(),
          table.const_data_ptr<int64_t>(),
          segment_table.numel(),
          out.mutable_data_ptr<int64_t>(),
          report_of(found),
      };
      check_device(
          device_library().translate(&a, sizeof(id), sizeof(code), reinterpret_cast<void*>(stream)),
          "the translation could not be started");
    });
  });
  if (report) return out;
  const int64_t bad = found[0].item<int64_t>();
  OPER_CHECK_INDEX(bad < 0, "id number ", bad, " is out of its table's range");
  return out;
}

}  // namespace
}  // namespace oper

TORCH_LIBRARY_IMPL(oper, CUDA, m) { m.impl("translate", oper::translate); }

// translate for tests, of memory that the emulator takes for a device's.
TORCH_LIBRARY_FRAGMENT(oper_emulated, m) { m.def(oper::schemas::kTranslate); }
TORCH_LIBRARY_IMPL(oper_emulated, CPU, m) { m.impl("translate", oper::translate); }
