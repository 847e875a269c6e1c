// oper_cuda_update_runs: starts the update of rows by the runs of a batch.

#include "oper/cuda/update_runs.cuh"

#include <algorithm>

namespace oper {
namespace {

constexpr unsigned kThreads = 256;
// Turns of blocks: those that finish early make room for others, where runs are unlike.
constexpr int64_t kTurns = 4;

template <typename Optimizer, int kCount, bool kThere>
cudaError_t start(RunUpdateArguments a, cudaStream_t stream) {
  a.lanes = lanes_for((a.arena.dim + kCount - 1) / kCount);
  const int64_t needed = (a.sums.accesses * a.lanes + kThreads - 1) / kThreads;
  const auto kernel = step_runs<Optimizer, kCount, kThere>;
  const int64_t blocks = std::min(needed, kTurns * blocks_at_once(kernel, kThreads));
  const Launch how{dim3(static_cast<unsigned>(blocks)), kThreads, stream};
  return launch(how, kernel, a);
}

}  // namespace
}  // namespace oper

extern "C" int oper_cuda_update_runs(const oper::RunUpdateArguments* a, int64_t optimizer,
                                     void* stream) {
  using namespace oper;
  const auto on = static_cast<cudaStream_t>(stream);
  return with_step(*a, optimizer, [&](auto of, auto count, auto there) {
    return start<decltype(of), count(), there()>(*a, on);
  });
}
