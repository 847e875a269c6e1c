// oper_cuda_lay_out_gradients: starts laying out the gradients of a batch's rows.

#include "oper/cuda/lay_out_gradients.cuh"

extern "C" int oper_cuda_lay_out_gradients(const oper::BucketDims* dims, const int64_t* before,
                                           int64_t* groups, void* stream) {
  using namespace oper;
  constexpr int64_t kThreads = 256, kBuckets = kThreads / kWarpThreads;
  const Launch how{dim3(static_cast<unsigned>((dims->buckets + kBuckets - 1) / kBuckets)), kThreads,
                   static_cast<cudaStream_t>(stream)};
  return launch(how, lay_out_gradients, *dims, before, groups);
}
