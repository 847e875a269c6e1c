// torch.ops.oper.wait_signals and post_signal: counters in shared memory by which the ranks of a
// node wait for each other.

#include "oper/comm/futex.h"

#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <limits>

#include "cpu/common/arguments.h"

namespace oper {
namespace {

Signal* signals_of(const at::Tensor& signals) {
  constexpr int64_t kWords = sizeof(Signal) / sizeof(int32_t);
  auto* const first = writable_elements<int32_t>(signals, 0, "signals");
  OPER_CHECK_VALUE(signals.dim() == 2 && signals.size(1) == kWords, "signals: expected [signals, ",
                   kWords, "], got ", signals.sizes());
  OPER_CHECK_VALUE(reinterpret_cast<uintptr_t>(first) % sizeof(Signal) == 0,
                   "signals: must begin on a cache line");
  return reinterpret_cast<Signal*>(first);
}

int32_t as_value(int64_t value) {
  OPER_CHECK_VALUE(
      value >= std::numeric_limits<int32_t>::min() && value <= std::numeric_limits<int32_t>::max(),
      "value: ", value, " is no int32");
  return static_cast<int32_t>(value);
}

int64_t wait_signals(const at::Tensor& signals, int64_t value, int64_t timeout_ms) {
  return wait_for_all(signals_of(signals), signals.size(0), as_value(value), timeout_ms);
}

void post_signal(const at::Tensor& signals, int64_t index, int64_t value) {
  check_index(index, signals.size(0), "index", "signals");
  post(signals_of(signals)[index], as_value(value));
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(oper, m) {
  m.def("wait_signals(Tensor signals, int value, int timeout_ms) -> int");
  m.def("post_signal(Tensor(a!) signals, int index, int value) -> ()");
}

TORCH_LIBRARY_IMPL(oper, CPU, m) {
  m.impl("wait_signals", wait_signals);
  m.impl("post_signal", post_signal);
}

}  // namespace oper
