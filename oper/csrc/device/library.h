// The library of device kernels, oper/_cuda.so: loaded when a device is first used, so that this
// extension is one binary for machines with and without one, and knows nothing of CUDA's headers.
#pragma once

#include <string>

#include "oper/cuda/launchers.h"

namespace oper {

struct DeviceLibrary {
  LookupLauncher* lookup = nullptr;
  TranslateLauncher* translate = nullptr;
  CountLauncher* accesses_by_rank = nullptr;
  CreateSegment* create_segment = nullptr;
  AttachSegment* attach_segment = nullptr;
  ReleaseSegment* release_segment = nullptr;
  CudaVersions* versions = nullptr;
  Architectures* architectures = nullptr;
  ErrorText* error_text = nullptr;
};

// The launchers; RuntimeError with what to do where no library was loaded.
const DeviceLibrary& device_library();

// Throws where a launcher returned an error; `what` was to be done.
void check_device(int error, const char* what);

}  // namespace oper
