// oper_cuda_sum_gradients: starts the sums of gradients by row.

#include "oper/cuda/sum_gradients.cuh"

#include <algorithm>

namespace oper {
namespace {

constexpr unsigned kThreads = 256;
// Turns of blocks: those that finish early make room for others, where work is uneven.
constexpr int64_t kTurns = 4;
// Gradients, or pieces' sums, that are on their way: two would do for the latency of HBM, but a
// piece is one chain of reads. More do not fit the registers.
constexpr int kAhead = 4;

unsigned blocks_for(int64_t groups_of_threads, int64_t lanes, int64_t at_once) {
  const int64_t needed = (groups_of_threads * lanes + kThreads - 1) / kThreads;
  return static_cast<unsigned>(std::min(needed, kTurns * at_once));
}

template <typename Row, int kBytes, int kLanes>
cudaError_t sum(const SumArguments& a, cudaStream_t stream) {
  constexpr int64_t kColumns = kLanes * Values<Row, kBytes>::kCount;
  const auto parts = static_cast<unsigned>((a.dim + kColumns - 1) / kColumns);
  const int64_t items = a.values ? a.accesses : partial_sums(a.accesses);
  if (items == 0) return cudaSuccess;
  const auto kernel = sum_runs<Row, kBytes, kLanes, kAhead>;
  const unsigned blocks = blocks_for(items, kLanes, blocks_at_once(kernel, kThreads));
  return launch({dim3(blocks, parts), kThreads, stream}, kernel, a);
}

// A gradient gets as many threads as it has pieces, up to a warp.
template <typename Row>
cudaError_t with_lanes(const SumArguments& a, bool wide, cudaStream_t stream) {
  const int64_t pieces = a.dim / Values<Row, 16>::kCount;
  if (!wide || a.dim % Values<Row, 16>::kCount != 0)
    return sum<Row, sizeof(typename Row::Value), 32>(a, stream);
  if (pieces <= 4) return sum<Row, 16, 4>(a, stream);
  if (pieces <= 8) return sum<Row, 16, 8>(a, stream);
  if (pieces <= 16) return sum<Row, 16, 16>(a, stream);
  return sum<Row, 16, 32>(a, stream);
}

cudaError_t sum_type(const SumArguments& a, int64_t grad_type, bool wide, cudaStream_t stream) {
  switch (grad_type) {
    case kFloat32: return with_lanes<Float32Row>(a, wide, stream);
    case kFloat16: return with_lanes<Float16Row>(a, wide, stream);
    case kBFloat16: return with_lanes<BFloat16Row>(a, wide, stream);
    default: return cudaErrorInvalidValue;
  }
}

unsigned blocks_of(int64_t threads) {
  return static_cast<unsigned>((threads + kThreads - 1) / kThreads);
}

cudaError_t find(const SumArguments& a, cudaStream_t stream) {
  const Launch how{dim3(blocks_of(a.accesses)), kThreads, stream};
  return a.factor ? launch(how, find_gradients<true>, a) : launch(how, find_gradients<false>, a);
}

cudaError_t number(const SumArguments& a, cudaStream_t stream) {
  const Launch how{dim3(blocks_of(a.bags)), kThreads, stream};
  return a.offsets32 ? launch(how, number_bags<int32_t>, a, a.offsets32)
                     : launch(how, number_bags<int64_t>, a, a.offsets64);
}

}  // namespace
}  // namespace oper

extern "C" int oper_cuda_sum_gradients(const oper::SumArguments* a, int64_t grad_type,
                                       void* stream) {
  using namespace oper;
  const auto on = static_cast<cudaStream_t>(stream);
  const bool wide = a->dim % 4 == 0 && reinterpret_cast<uintptr_t>(a->values) % 16 == 0;
  cudaError_t error = cudaSuccess;
  if (a->bag_of && a->bags > 0) error = number(*a, on);
  if (!error) error = find(*a, on);
  if (!error) error = sum_type(*a, grad_type, wide, on);
  const int64_t windows = partial_sums(a->accesses) / 2;
  if (error || windows == 0) return error;
  const auto kernel = wide ? add_pieces<16, kAhead> : add_pieces<4, kAhead>;
  const unsigned blocks = blocks_for(windows, kWarpThreads, blocks_at_once(kernel, kThreads));
  return launch({dim3(blocks), kThreads, on}, kernel, *a);
}
