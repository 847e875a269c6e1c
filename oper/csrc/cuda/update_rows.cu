// oper_cuda_update_rows: starts the update of the rows that lists of gradients name.

#include "oper/cuda/update_rows.cuh"

#include <algorithm>
#include <tuple>

namespace oper {
namespace {

constexpr int64_t kThreads = 256;
constexpr int64_t kBlocksAtOnce = 8;  // of a multiprocessor, at the most: 2,048 threads

// Threads that hold a row: as many as it has pieces of kCount values, up to a warp.
template <int kCount>
int64_t lanes_of(int64_t dim) {
  int64_t lanes = 1;
  while (lanes < kWarpThreads && lanes * kCount < dim) lanes *= 2;
  return lanes;
}

template <typename Optimizer, int kCount>
cudaError_t start(UpdateArguments a, int64_t most_rows, cudaStream_t stream) {
  a.lanes = lanes_of<kCount>(a.arena.dim);
  const int64_t rows_of_block = kThreads / a.lanes;
  const int64_t blocks =
      std::min((most_rows + rows_of_block - 1) / rows_of_block, kBlocksAtOnce * multiprocessors());
  if (blocks == 0) return cudaSuccess;
  const Launch how{dim3(static_cast<unsigned>(blocks), static_cast<unsigned>(a.lists)), kThreads,
                   stream};
  return a.lists > 1 ? launch(how, step_rows<Optimizer, kCount, true>, a)
                     : launch(how, step_rows<Optimizer, kCount, false>, a);
}

template <size_t n = 0>
cudaError_t with_optimizer(const UpdateArguments& a, int64_t optimizer, int64_t most_rows,
                           cudaStream_t stream) {
  if constexpr (n == std::tuple_size_v<Optimizers>) {
    return cudaErrorInvalidValue;
  } else {
    using Optimizer = std::tuple_element_t<n, Optimizers>;
    if (optimizer != n) return with_optimizer<n + 1>(a, optimizer, most_rows, stream);
    return a.wide_rows ? start<Optimizer, 4>(a, most_rows, stream)
                       : start<Optimizer, 1>(a, most_rows, stream);
  }
}

}  // namespace
}  // namespace oper

extern "C" int oper_cuda_update_rows(const oper::UpdateArguments* a, int64_t optimizer,
                                     int64_t most_rows, void* stream) {
  return oper::with_optimizer(*a, optimizer, most_rows, static_cast<cudaStream_t>(stream));
}
