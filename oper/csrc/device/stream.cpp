// torch.ops.oper.stream_is_done: a wait for a stream that comes to an end.

#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include "device/library.h"

namespace oper {
namespace {

bool stream_is_done(int64_t stream, int64_t milliseconds, c10::Device device) {
  const c10::DeviceGuard guard(device);
  int done = 0;
  check_device(
      device_library().stream_is_done(reinterpret_cast<void*>(stream), milliseconds, &done),
      "work on the device failed");
  return done != 0;
}

}  // namespace
}  // namespace oper

TORCH_LIBRARY_FRAGMENT(oper, m) {
  m.def("stream_is_done(int stream, int milliseconds, Device device) -> bool");
}

TORCH_LIBRARY_IMPL(oper, CompositeExplicitAutograd, m) {
  m.impl("stream_is_done", oper::stream_is_done);
}
