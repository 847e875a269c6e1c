// oper_cuda_weight_gradients: starts the gradients of weights of features of one shape of rows.

#include "oper/cuda/weight_gradients.cuh"

namespace oper {
namespace {

constexpr int kRows = 2;  // of a bag whose products are made at once

template <typename Row, int kValues>
cudaError_t start(WeightArguments& a, int64_t features, cudaStream_t stream) {
  return launch_tiles(weight_gradients<Row, kValues, kRows>, a, features,
                      kWeightThreads * kValues / kDotSums, kWeightThreads, stream);
}

template <typename Row>
cudaError_t with_values(WeightArguments& a, int64_t features, cudaStream_t stream) {
  const bool wide = a.wide && a.row_bytes % (4 * kValueBytes<Row>) == 0;
  return wide ? start<Row, 4>(a, features, stream) : start<Row, 1>(a, features, stream);
}

}  // namespace
}  // namespace oper

extern "C" int oper_cuda_weight_gradients(oper::WeightArguments* a, int64_t row_type,
                                          int64_t features, void* stream) {
  using namespace oper;
  const auto on = static_cast<cudaStream_t>(stream);
  switch (row_type) {
    case kFloat32: return with_values<Float32Row>(*a, features, on);
    case kFloat16: return with_values<Float16Row>(*a, features, on);
    case kBFloat16: return with_values<BFloat16Row>(*a, features, on);
    case kInt8: return with_values<Int8Row>(*a, features, on);
    default: return cudaErrorInvalidValue;
  }
}
