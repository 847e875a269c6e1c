// oper_cuda_accesses_by_rank: starts counting which ranks a batch's accesses read from.

#include "oper/cuda/accesses_by_rank.cuh"

extern "C" int oper_cuda_accesses_by_rank(const oper::CountArguments* a, int64_t features,
                                          int64_t accesses, void* stream) {
  using namespace oper;
  constexpr unsigned kThreads = 256;
  const int64_t blocks = (accesses + kThreads * kAddresses - 1) / (kThreads * kAddresses);
  if (blocks == 0) return cudaSuccess;
  const Launch how{dim3(static_cast<unsigned>(blocks), static_cast<unsigned>(features)), kThreads,
                   static_cast<cudaStream_t>(stream)};
  return launch(how, accesses_by_rank, *a);
}
