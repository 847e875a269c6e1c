// oper_cuda_error and oper_cuda_interface: the text of an error, and what the library was built
// for.

#include "oper/cuda/device.h"
#include "oper/cuda/launchers.h"

extern "C" const char* oper_cuda_error(int error) {
  return cudaGetErrorString(static_cast<cudaError_t>(error));
}

extern "C" int64_t oper_cuda_interface() { return oper::kDeviceInterface; }
