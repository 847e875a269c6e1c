// oper_cuda_count_accesses: starts counting which ranks a batch's accesses read from.

#include "oper/cuda/count_accesses.cuh"

extern "C" int oper_cuda_count_accesses(const oper::CountArguments* a, int64_t features,
                                        int64_t most_accesses, void* stream) {
  using namespace oper;
  constexpr unsigned kThreads = 256;
  const int64_t blocks = (most_accesses + kThreads * kAddresses - 1) / (kThreads * kAddresses);
  if (blocks == 0) return cudaSuccess;
  const Launch how{dim3(static_cast<unsigned>(blocks), static_cast<unsigned>(features)), kThreads,
                   static_cast<cudaStream_t>(stream)};
  return launch(how, count_accesses, *a);
}
