// oper_cuda_lay_out_gradients and oper_cuda_merge_gradients: start laying out the gradients of a
// batch's rows, and merging those of two lists.

#include <algorithm>

#include "oper/cuda/lay_out_gradients.cuh"
#include "oper/cuda/merge_gradients.cuh"

namespace oper {
namespace {

constexpr unsigned kThreads = 256;
// Turns of blocks: those that finish early make room for others.
constexpr int64_t kTurns = 4;

Launch threads_for(int64_t things, unsigned lists, cudaStream_t stream) {
  return {dim3(static_cast<unsigned>((things + kThreads - 1) / kThreads), lists), kThreads, stream};
}

}  // namespace
}  // namespace oper

extern "C" int oper_cuda_lay_out_gradients(const oper::BucketDims* dims, const int64_t* before,
                                           int64_t* groups, void* stream) {
  using namespace oper;
  const int64_t threads = dims->buckets * kWarpThreads;
  return launch(threads_for(threads, 1, static_cast<cudaStream_t>(stream)), lay_out_gradients,
                *dims, before, groups);
}

extern "C" int oper_cuda_merge_gradients(const oper::MergeArguments* a, void* stream) {
  using namespace oper;
  const auto on = static_cast<cudaStream_t>(stream);
  const int64_t rows = std::max(a->most_rows[0], a->most_rows[1]);
  const int64_t strips = rows / kMergeStrip + 1;
  cudaError_t error = launch(threads_for(strips * kWarpThreads, 2, on), match_rows, *a);
  if (!error) error = launch(Launch{dim3(1), kCountThreads, on}, count_rows, *a);
  if (error || rows == 0) return error;
  error = launch(threads_for(rows, 2, on), place_rows, *a);
  const int64_t at_once = kTurns * blocks_at_once(add_rows, kThreads) * kThreads;
  const int64_t threads = std::min((a->most_values + kSumValues - 1) / kSumValues, at_once);
  if (error || threads == 0) return error;
  return launch(threads_for(threads, 1, on), add_rows, *a);
}
