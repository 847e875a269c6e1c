// oper_cuda_stream, oper_cuda_is_captured: waits for the work of a stream, and no longer than it is
// told to; whether a stream's work is being captured.

#include <algorithm>
#include <chrono>
#include <thread>

#include "oper/cuda/device.h"
#include "oper/cuda/launchers.h"

extern "C" int oper_cuda_stream(void* stream, int64_t milliseconds, int* done) {
  using Clock = std::chrono::steady_clock;
  using std::chrono::microseconds;
  // Most waits of a step end within this. Ranks that wait longer leave the processor to others: a
  // sixteenth of the time so far is the most that a wait becomes longer by that.
  constexpr microseconds kPolled(50), kLongestPause(200);
  const Clock::time_point begin = Clock::now(),
                          end = begin + std::chrono::milliseconds(milliseconds);
  for (;;) {
    const cudaError_t error = cudaStreamQuery(static_cast<cudaStream_t>(stream));
    *done = error == cudaSuccess;
    if (error != cudaErrorNotReady) return error;
    cudaGetLastError();  // clears cudaErrorNotReady, which is no failure
    const Clock::time_point now = Clock::now();
    if (now >= end) return cudaSuccess;
    if (now - begin < kPolled)
      std::this_thread::yield();
    else
      std::this_thread::sleep_for(std::min<Clock::duration>((now - begin) / 16, kLongestPause));
  }
}

extern "C" int oper_cuda_is_captured(void* stream, int* captured) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  const cudaError_t error = cudaStreamIsCapturing(static_cast<cudaStream_t>(stream), &status);
  *captured = status != cudaStreamCaptureStatusNone;
  return error;
}
