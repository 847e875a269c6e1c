// oper_cuda_mark_replicas, oper_cuda_unite_words, oper_cuda_list_replicas,
// oper_cuda_aggregate_rows, oper_cuda_sum_slice, oper_cuda_sum_buffers, oper_cuda_gather_slices and
// oper_cuda_mark_touched: the steps of the replicas' AllReduce by sums of buffers.

#include "oper/cuda/replica_sums.cuh"

#include <algorithm>

extern "C" int oper_cuda_mark_replicas(const oper::MarkArguments* a, int64_t most_rows,
                                       void* stream) {
  using namespace oper;
  return launch_threads(mark_replicas, *a, most_rows, a->buckets, stream);
}

extern "C" int oper_cuda_unite_words(const oper::UnionArguments* a, void* stream) {
  using namespace oper;
  constexpr unsigned kThreads = 256;
  const auto on = static_cast<cudaStream_t>(stream);
  const int64_t tiles = (a->words + kTileWords - 1) / kTileWords;
  const int64_t blocks = (tiles * kWarpThreads + kThreads - 1) / kThreads;
  if (blocks > 0) {
    const Launch how{dim3(static_cast<unsigned>(blocks)), kThreads, on};
    if (const cudaError_t error = launch(how, unite_words, *a)) return error;
  }
  return launch({dim3(1), kWarpThreads, on}, scan_tiles, *a);
}

extern "C" int oper_cuda_list_replicas(const oper::ListArguments* a, void* stream) {
  using namespace oper;
  const int64_t words = a->first_word[a->buckets] - a->first_word[0];
  return launch_threads(list_replicas, *a, std::max(words, a->buckets + 1), 1, stream);
}

extern "C" int oper_cuda_aggregate_rows(const oper::AggregateArguments* a, int64_t most_rows,
                                        void* stream) {
  using namespace oper;
  return launch_rows(aggregate_rows, *a, most_rows, stream);
}

extern "C" int oper_cuda_sum_slice(const oper::SliceArguments* a, int64_t most_values,
                                   void* stream) {
  using namespace oper;
  if (most_values == 0) return cudaSuccess;
  const int64_t of_slice = (most_values / kLineValues + a->ranks) / a->ranks * kLineValues;
  return launch_threads(sum_slice, *a, of_slice / kOfThread, 1, stream);
}

extern "C" int oper_cuda_sum_buffers(const oper::BufferArguments* a, void* stream) {
  using namespace oper;
  return launch(a_thread_each(a->values, stream), add_buffers, *a);
}

extern "C" int oper_cuda_gather_slices(const oper::SliceArguments* a, int64_t most_values,
                                       void* stream) {
  using namespace oper;
  return launch_threads(gather_slices, *a, most_values / kOfThread, 1, stream);
}

extern "C" int oper_cuda_mark_touched(const oper::TouchedArguments* a, void* stream) {
  using namespace oper;
  if (a->buckets == 0) return cudaSuccess;
  const int64_t most_rows = *std::max_element(a->count, a->count + a->buckets);
  return launch_threads(mark_touched, *a, most_rows, a->buckets, stream);
}
