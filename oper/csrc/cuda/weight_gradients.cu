// oper_cuda_weight_gradients: starts the gradients of weights of features of one shape of rows.

#include "oper/cuda/weight_gradients.cuh"

namespace oper {
namespace {

constexpr unsigned kThreads = 256;
constexpr int kRows = 2;  // of a bag whose products are made at once

template <typename Row, int kValues>
cudaError_t start(const WeightArguments& a, int64_t features, int64_t most_bags,
                  cudaStream_t stream) {
  constexpr int64_t kBags = kThreads * kValues / kDotSums;
  const int64_t blocks = (most_bags + kBags - 1) / kBags;
  if (blocks == 0) return cudaSuccess;
  const Launch how{dim3(static_cast<unsigned>(blocks), static_cast<unsigned>(features)), kThreads,
                   stream};
  return launch(how, weight_gradients<Row, kValues, kRows>, a);
}

template <typename Row>
cudaError_t with_values(const WeightArguments& a, int64_t features, int64_t most_bags,
                        cudaStream_t stream) {
  const bool wide = a.wide && a.row_bytes % (4 * kValueBytes<Row>) == 0;
  return wide ? start<Row, 4>(a, features, most_bags, stream)
              : start<Row, 1>(a, features, most_bags, stream);
}

}  // namespace
}  // namespace oper

extern "C" int oper_cuda_weight_gradients(const oper::WeightArguments* a, int64_t row_type,
                                          int64_t features, int64_t most_bags, void* stream) {
  using namespace oper;
  const auto on = static_cast<cudaStream_t>(stream);
  switch (row_type) {
    case kFloat32: return with_values<Float32Row>(*a, features, most_bags, on);
    case kFloat16: return with_values<Float16Row>(*a, features, most_bags, on);
    case kBFloat16: return with_values<BFloat16Row>(*a, features, most_bags, on);
    case kInt8: return with_values<Int8Row>(*a, features, most_bags, on);
    default: return cudaErrorInvalidValue;
  }
}
