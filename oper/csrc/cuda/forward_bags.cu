// oper_cuda_list_forwarded and the others start what takes a batch's bags apart by nodes, and puts
// them together with those of others.

#include "oper/cuda/forward_bags.cuh"

#include <algorithm>

extern "C" int oper_cuda_list_forwarded(const oper::ForwardArguments* a, void* stream) {
  using namespace oper;
  return launch(a_thread_each(std::max(a->given.accesses, a->given.bags), stream), list_forwarded,
                *a);
}

extern "C" int oper_cuda_count_forwarded(const int64_t* before, const int32_t* run_start,
                                         int64_t groups, int64_t* counts, void* stream) {
  using namespace oper;
  return launch(a_thread_each(groups + 1, stream), count_forwarded, before, run_start, groups,
                counts);
}

extern "C" int oper_cuda_write_forwarded(const oper::ParcelArguments* a, void* stream) {
  using namespace oper;
  const int64_t heads = a->nodes.others * kHeadWords * a->features;
  return launch(a_thread_each(std::max({heads, a->runs, a->accesses}), stream), write_forwarded,
                *a);
}

extern "C" int oper_cuda_list_lengths(const oper::JoinArguments* a, int64_t bags, void* stream) {
  using namespace oper;
  return launch(a_thread_each(std::max<int64_t>(bags, 1), stream), list_lengths, *a);
}

extern "C" int oper_cuda_join_accesses(const oper::JoinArguments* a, int64_t received,
                                       void* stream) {
  using namespace oper;
  cudaError_t error = cudaSuccess;
  if (a->own > 0)
    error = launch(a_thread_each(a->given.bags * kWarpThreads, stream), keep_accesses, *a);
  if (error || received == 0) return error;
  return launch(a_thread_each(received, stream), take_received, *a);
}

extern "C" int oper_cuda_move_vectors(const oper::VectorArguments* a, int64_t values, int64_t add,
                                      void* stream) {
  using namespace oper;
  return launch(a_thread_each(values, stream), add ? move_vectors<true> : move_vectors<false>, *a);
}
