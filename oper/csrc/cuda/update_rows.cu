// oper_cuda_update_rows: starts the update of the rows that lists of gradients name.

#include "oper/cuda/update_rows.cuh"

#include <algorithm>

namespace oper {
namespace {

constexpr unsigned kThreads = 256;

template <typename Optimizer, int kCount, bool kThere>
cudaError_t start(UpdateArguments a, int64_t most_rows, cudaStream_t stream) {
  a.lanes = lanes_for((a.arena.dim + kCount - 1) / kCount);
  const int64_t rows_of_block = kThreads / a.lanes;
  const auto kernel = a.lists > 1 ? step_rows<Optimizer, kCount, kThere, true>
                                  : step_rows<Optimizer, kCount, kThere, false>;
  // Each list has as many: blocks of lists that are short end early and make room for the others.
  const int64_t blocks =
      std::min((most_rows + rows_of_block - 1) / rows_of_block, blocks_at_once(kernel, kThreads));
  if (blocks == 0) return cudaSuccess;
  const Launch how{dim3(static_cast<unsigned>(blocks), static_cast<unsigned>(a.lists)), kThreads,
                   stream};
  return launch(how, kernel, a);
}

}  // namespace
}  // namespace oper

extern "C" int oper_cuda_update_rows(const oper::UpdateArguments* a, int64_t optimizer,
                                     int64_t most_rows, void* stream) {
  using namespace oper;
  const auto on = static_cast<cudaStream_t>(stream);
  return with_step(*a, optimizer, [&](auto of, auto count, auto there) {
    return start<decltype(of), count(), there()>(*a, most_rows, on);
  });
}
