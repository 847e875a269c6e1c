// torch.ops.oper.copy_rows and redirect on a device.

#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <limits>
#include <optional>
#include <vector>

#include "cpu/common/arguments.h"
#include "cpu/step/copied_rows.h"
#include "device/arguments.h"
#include "device/library.h"
#include "schemas.h"

namespace oper {
namespace {

// The widest words that rows of such a size can be copied by, between such places.
int64_t word_bytes(const void* arena, const void* out, int64_t row_bytes) {
  int64_t bytes = 16;
  while ((reinterpret_cast<int64_t>(arena) | reinterpret_cast<int64_t>(out) | row_bytes) % bytes)
    bytes /= 2;
  return bytes;
}

void copy_rows(const at::Tensor& slots, at::IntArrayRef firsts, at::IntArrayRef counts,
               at::IntArrayRef arenas, at::IntArrayRef row_bytes, at::Tensor& out,
               at::IntArrayRef places, const std::optional<at::Tensor>& targets,
               at::IntArrayRef called, int64_t stream) {
  const c10::DeviceGuard guard(out.device());
  check_on(slots, out, "slots");
  if (targets) check_on(*targets, out, "targets");
  CopyArguments a{};
  a.slots = elements<int64_t>(slots, "slots");
  if (targets) a.targets = targets->mutable_data_ptr<int64_t>();
  std::vector<int64_t> begins, pieces;
  for_copied_rows(
      slots, firsts, counts, arenas, row_bytes, out, places, targets, called,
      [&](const CopiedRows& of) {
        if (of.count == 0) return;
        const int64_t row_words = of.row_bytes / word_bytes(of.arena, of.out, of.row_bytes);
        append_words(pieces,
                     CopiedPiece{of.arena, of.out, of.first, of.row_bytes, row_words, of.called});
        begins.push_back(a.words);
        a.words += product(of.count, row_words, "counts");
        check_size(a.words, 0, std::numeric_limits<int32_t>::max() * int64_t{256}, "counts: words");
      });
  if (a.words == 0) return;
  a.pieces = static_cast<int64_t>(begins.size());
  begins.push_back(a.words);
  const at::Tensor listed = brought({pieces, begins}, out.options(), stream);
  const auto* const there = listed.const_data_ptr<int64_t>();
  a.piece = reinterpret_cast<const CopiedPiece*>(there);
  a.begins = there + pieces.size();
  check_device(device_library().copy_rows(&a, reinterpret_cast<void*>(stream)),
               "copying rows could not be started");
}

void redirect(at::Tensor& addresses, const at::Tensor& positions, const at::Tensor& run_start,
              const at::Tensor& targets, int64_t stream) {
  const c10::DeviceGuard guard(addresses.device());
  check_on(positions, addresses, "positions");
  check_on(run_start, addresses, "run_start");
  check_on(targets, addresses, "targets");
  RedirectArguments a{};
  a.positions = elements<int32_t>(positions, "positions");
  a.runs = targets.numel();
  a.run_start = elements_at_least<int32_t>(run_start, a.runs + 1, "run_start");
  a.targets = elements<int64_t>(targets, "targets");
  a.accesses = positions.numel();
  a.addresses = writable_elements<int64_t>(addresses, 0, "addresses");
  if (a.runs == 0 || a.accesses == 0) return;
  check_device(device_library().redirect(&a, reinterpret_cast<void*>(stream)),
               "leading accesses to rows could not be started");
}

}  // namespace
}  // namespace oper

TORCH_LIBRARY_IMPL(oper, CUDA, m) {
  m.impl("copy_rows", oper::copy_rows);
  m.impl("redirect", oper::redirect);
}

// For tests, of memory that the emulator takes for a device's.
TORCH_LIBRARY_FRAGMENT(oper_emulated, m) {
  m.def(oper::schemas::kCopyRows);
  m.def(oper::schemas::kRedirect);
}
TORCH_LIBRARY_IMPL(oper_emulated, CPU, m) {
  m.impl("copy_rows", oper::copy_rows);
  m.impl("redirect", oper::redirect);
}
