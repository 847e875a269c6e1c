// A guard of CUDA devices that does nothing, for a torch that was built without: with it, tensors
// that say they are on a device can be indexed. It is registered when the library is loaded.

#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {

using Guard = c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA>;
const c10::impl::DeviceGuardImplRegistrar registered(c10::DeviceType::CUDA, new Guard);

}  // namespace
