// oper_cuda_error: the text of an error.

#include "oper/cuda/device.h"

extern "C" const char* oper_cuda_error(int error) {
  return cudaGetErrorString(static_cast<cudaError_t>(error));
}
