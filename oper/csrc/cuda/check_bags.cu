// oper_cuda_check_bags and oper_cuda_post_report: start the check of a batch's offsets, and bring
// what was found to the host.

#include "oper/cuda/check_bags.cuh"

extern "C" int oper_cuda_check_bags(const oper::BagArguments* a, void* stream) {
  using namespace oper;
  constexpr unsigned kThreads = 256;
  const int64_t blocks = (a->bags + kThreads - 1) / kThreads;
  if (blocks == 0) return cudaSuccess;
  const Launch how{dim3(static_cast<unsigned>(blocks)), kThreads,
                   static_cast<cudaStream_t>(stream)};
  return a->offsets32 ? launch(how, check_bags<int32_t>, *a, a->offsets32)
                      : launch(how, check_bags<int64_t>, *a, a->offsets64);
}

extern "C" int oper_cuda_post_report(const oper::BatchReport* report, oper::BatchReport* slots,
                                     int64_t count, int64_t* posted, void* stream) {
  return oper::launch(oper::a_thread_each(1, stream), oper::post_report, report, slots, count,
                      posted);
}
