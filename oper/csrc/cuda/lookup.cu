// oper_cuda_lookup: starts the lookup of features of one shape of rows.

#include "oper/cuda/lookup.cuh"

#include <algorithm>

#include "oper/cuda/row_shapes.h"

namespace oper {
namespace {

constexpr unsigned kThreads = 256;
// Reads of a row on their way: two would do for the latency of HBM, four are double that, and more
// cost registers and so occupancy.
constexpr int kRows = 4;
// Reads on their way where most bags have one row; more would not fit the registers of rows of
// eight values a piece.
template <typename Row>
constexpr int kShortBags = sizeof(typename Row::Value) == 2 ? 2 : 3;
constexpr int64_t kMostShortBags = int64_t{1} << 30;

template <typename Row, int kBytes, int kLanes>
cudaError_t start(const LookupArguments& a, int64_t features, int64_t most_bags,
                  cudaStream_t stream) {
  const bool short_bags = a.short_bags && most_bags <= kMostShortBags;
  const int64_t bags_per_block = kThreads / kLanes * (short_bags ? kShortBags<Row> : 1);
  int64_t blocks = (most_bags + bags_per_block - 1) / bags_per_block;
  if (blocks == 0) return cudaSuccess;
  if (short_bags) {  // as many as are there at once, for all features together
    const int64_t at_once = int64_t{kBlocksOfShortBags} * multiprocessors();
    blocks = std::min(blocks, (at_once + features - 1) / features);
  }
  const Launch how{dim3(static_cast<unsigned>(blocks), static_cast<unsigned>(features)), kThreads,
                   stream};
  if (short_bags) return launch(how, pool_short_bags<Row, kBytes, kLanes, kShortBags<Row>>, a);
  return a.weights ? launch(how, pool_bags<Row, kBytes, kLanes, kRows, true, Mapped>, a)
                   : launch(how, pool_bags<Row, kBytes, kLanes, kRows, false, Mapped>, a);
}

}  // namespace
}  // namespace oper

extern "C" int oper_cuda_lookup(const oper::LookupArguments* a, int64_t row_type, int64_t features,
                                int64_t most_bags, void* stream) {
  using namespace oper;
  const auto on = static_cast<cudaStream_t>(stream);
  return with_row_shape(*a, row_type, [&](auto shape) {
    using Shape = decltype(shape);
    return start<typename Shape::Row, Shape::kBytes, Shape::kLanes>(*a, features, most_bags, on);
  });
}
