// oper_cuda_error, oper_cuda_interface, oper_cuda_versions and oper_cuda_architectures: the text of
// an error, and what the library was built for.

#include "oper/cuda/device.h"
#include "oper/cuda/launchers.h"

extern "C" const char* oper_cuda_error(int error) {
  return cudaGetErrorString(static_cast<cudaError_t>(error));
}

extern "C" int64_t oper_cuda_interface() { return oper::kDeviceInterface; }

extern "C" void oper_cuda_versions(int* driver, int* runtime) {
  *driver = *runtime = 0;
  cudaDriverGetVersion(driver);
  cudaRuntimeGetVersion(runtime);
}

#if defined(__CUDACC__)
// nvcc lists them as numbers of three digits, such as 800.
#define OPER_TEXT_OF(...) #__VA_ARGS__
#define OPER_TEXT(...) OPER_TEXT_OF(__VA_ARGS__)
extern "C" const char* oper_cuda_architectures() { return OPER_TEXT(__CUDA_ARCH_LIST__); }
#else
extern "C" const char* oper_cuda_architectures() { return emulator::kArchitectures; }
#endif
