// oper_cuda_stream: waits for the work of a stream, and no longer than it is told to.

#include <chrono>
#include <thread>

#include "oper/cuda/device.h"
#include "oper/cuda/launchers.h"

extern "C" int oper_cuda_stream(void* stream, int64_t milliseconds, int* done) {
  using Clock = std::chrono::steady_clock;
  const Clock::time_point end = Clock::now() + std::chrono::milliseconds(milliseconds);
  for (;;) {
    const cudaError_t error = cudaStreamQuery(static_cast<cudaStream_t>(stream));
    *done = error == cudaSuccess;
    if (error != cudaErrorNotReady) return error;
    cudaGetLastError();  // of which this is none
    if (Clock::now() >= end) return cudaSuccess;
    std::this_thread::yield();
  }
}
