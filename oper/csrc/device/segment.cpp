// torch.ops.oper.create_device_segment and attach_device_segment: device memory that ranks share,
// as tensors of bytes. It is unmapped with the last tensor of it.

#include <ATen/ops/from_blob.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <algorithm>
#include <tuple>

#include "device/library.h"

namespace oper {
namespace {

int number_of(c10::Device device) { return std::max<int>(device.index(), 0); }

at::Tensor bytes_at(uint64_t pointer, uint64_t size, c10::Device device) {
  ReleaseSegment* const release = device_library().release_segment;
  // Whether it could be unmapped is not looked at: at the end of a process the driver may be gone.
  const auto unmap = [release, pointer, size, device](void*) {
    release(number_of(device), pointer, size);
  };
  return at::from_blob(reinterpret_cast<void*>(pointer), {static_cast<int64_t>(size)}, unmap,
                       at::TensorOptions().dtype(at::kByte).device(device), device);
}

// At least `bytes`, not zeroed, and a descriptor that the caller closes.
std::tuple<at::Tensor, int64_t> create_device_segment(int64_t bytes, c10::Device device) {
  TORCH_CHECK_VALUE(bytes > 0, "bytes: ", bytes, " is not positive");
  const c10::DeviceGuard guard(device);
  uint64_t size = 0, pointer = 0;
  int descriptor = -1;
  check_device(device_library().create_segment(number_of(device), static_cast<uint64_t>(bytes),
                                               &size, &pointer, &descriptor),
               "no memory of the device could be shared");
  return {bytes_at(pointer, size, device), descriptor};
}

// What another process created with this descriptor, of so many bytes; it stays open.
at::Tensor attach_device_segment(int64_t descriptor, int64_t bytes, c10::Device device) {
  TORCH_CHECK_VALUE(bytes > 0, "bytes: ", bytes, " is not positive");
  const c10::DeviceGuard guard(device);
  uint64_t pointer = 0;
  check_device(device_library().attach_segment(number_of(device), static_cast<int>(descriptor),
                                               static_cast<uint64_t>(bytes), &pointer),
               "memory that another rank shares could not be mapped on this device");
  return bytes_at(pointer, static_cast<uint64_t>(bytes), device);
}

}  // namespace
}  // namespace oper

TORCH_LIBRARY_FRAGMENT(oper, m) {
  m.def("create_device_segment(int bytes, Device device) -> (Tensor, int)");
  m.def("attach_device_segment(int descriptor, int bytes, Device device) -> Tensor");
}

TORCH_LIBRARY_IMPL(oper, CompositeExplicitAutograd, m) {
  m.impl("create_device_segment", oper::create_device_segment);
  m.impl("attach_device_segment", oper::attach_device_segment);
}
