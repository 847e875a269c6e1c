// torch.ops.oper.create_device_segment, attach_device_segment and hold_segments: device memory that
// ranks share, as tensors of bytes. It is unmapped with the last tensor of it, or later while
// segments are held.

#include <ATen/ops/from_blob.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <algorithm>
#include <functional>
#include <mutex>
#include <tuple>
#include <utility>
#include <vector>

#include "cpu/common/errors.h"
#include "device/library.h"

namespace oper {
namespace {

int device_number(c10::Device device) { return std::max<int>(device.index(), 0); }

// Segments whose last tensor has died while all are held: unmapping waits for the device, and a
// wait would end the capture of a CUDA graph.
struct Held {
  std::mutex mutex;
  int64_t holders = 0;
  std::vector<std::function<void()>> unmaps;
};

// Never destroyed: tensors may outlive all that is.
Held& held() {
  static Held& all = *new Held;
  return all;
}

// Unmaps now, or when nobody holds segments any more.
void unmap_unless_held(std::function<void()> unmap) {
  {
    const std::lock_guard<std::mutex> lock(held().mutex);
    if (held().holders > 0) {
      held().unmaps.push_back(std::move(unmap));
      return;
    }
  }
  unmap();
}

// Holds all segments, or no longer: as often the one as the other.
void hold_segments(bool hold) {
  std::vector<std::function<void()>> unmaps;
  {
    const std::lock_guard<std::mutex> lock(held().mutex);
    OPER_CHECK(hold || held().holders > 0, "hold: nobody holds segments");
    held().holders += hold ? 1 : -1;
    if (held().holders == 0) unmaps.swap(held().unmaps);
  }
  for (const auto& unmap : unmaps) unmap();
}

at::Tensor bytes_at(uint64_t pointer, uint64_t size, c10::Device device) {
  ReleaseSegment* const release = device_library().release_segment;
  // The result is ignored: at the end of a process the driver may be gone.
  const auto unmap = [release, pointer, size, device](void*) {
    unmap_unless_held([=] { release(device_number(device), pointer, size); });
  };
  return at::from_blob(reinterpret_cast<void*>(pointer), {static_cast<int64_t>(size)}, unmap,
                       at::TensorOptions().dtype(at::kByte).device(device), device);
}

// At least `bytes`, not zeroed, and a descriptor that the caller closes.
std::tuple<at::Tensor, int64_t> create_device_segment(int64_t bytes, c10::Device device) {
  OPER_CHECK_VALUE(bytes > 0, "bytes: ", bytes, " is not positive");
  const c10::DeviceGuard guard(device);
  uint64_t size = 0, pointer = 0;
  int descriptor = -1;
  check_device(device_library().create_segment(device_number(device), static_cast<uint64_t>(bytes),
                                               &size, &pointer, &descriptor),
               "no memory of the device could be shared");
  return {bytes_at(pointer, size, device), descriptor};
}

// What another process created with this descriptor, of so many bytes; it stays open.
at::Tensor attach_device_segment(int64_t descriptor, int64_t bytes, c10::Device device) {
  OPER_CHECK_VALUE(bytes > 0, "bytes: ", bytes, " is not positive");
  const c10::DeviceGuard guard(device);
  uint64_t pointer = 0;
  check_device(device_library().attach_segment(device_number(device), static_cast<int>(descriptor),
                                               static_cast<uint64_t>(bytes), &pointer),
               "memory that another rank shares could not be mapped on this device");
  return bytes_at(pointer, static_cast<uint64_t>(bytes), device);
}

}  // namespace
}  // namespace oper

TORCH_LIBRARY_FRAGMENT(oper, m) {
  m.def("create_device_segment(int bytes, Device device) -> (Tensor, int)");
  m.def("attach_device_segment(int descriptor, int bytes, Device device) -> Tensor");
  m.def("hold_segments(bool hold) -> ()", oper::hold_segments);
}

TORCH_LIBRARY_IMPL(oper, CompositeExplicitAutograd, m) {
  m.impl("create_device_segment", oper::create_device_segment);
  m.impl("attach_device_segment", oper::attach_device_segment);
}
