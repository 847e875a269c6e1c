// oper_nvshmem_lookup: starts the lookup of features of one shape of rows, some of which other
// nodes have.

#include <algorithm>

#include "oper/cuda/row_shapes.h"
#include "oper/nvshmem/row_gets.cuh"

namespace oper {
namespace {

constexpr unsigned kThreads = 256;
constexpr int kRows = 4;  // as cuda/lookup.cu has them

template <typename Row, int kBytes, int kLanes>
cudaError_t start(GetArguments& a, int64_t features, int64_t most_bags, cudaStream_t stream) {
  constexpr int64_t kGroups = kThreads / kLanes;  // of a block
  if (most_bags == 0) return cudaSuccess;
  // As many blocks as are there at once, for all features together, so that few rows need room;
  // fewer where these are so long that the stage has no room for one of each group.
  const int64_t at_once = int64_t{Gets::kBlocks} * multiprocessors();
  const int64_t room = a.stage_bytes / (kGroups * a.row_bytes) / features;
  const int64_t blocks =
      std::min({(most_bags + kGroups - 1) / kGroups, (at_once + features - 1) / features, room});
  if (blocks == 0) return cudaErrorInvalidValue;
  a.chunk = a.stage_bytes / (blocks * features * kGroups * a.row_bytes);
  const Launch how{dim3(static_cast<unsigned>(blocks), static_cast<unsigned>(features)), kThreads,
                   stream};
  return a.weights ? launch(how, pool_bags<Row, kBytes, kLanes, kRows, true, Gets>, a)
                   : launch(how, pool_bags<Row, kBytes, kLanes, kRows, false, Gets>, a);
}

}  // namespace
}  // namespace oper

extern "C" int oper_nvshmem_lookup(oper::GetArguments* a, int64_t row_type, int64_t features,
                                   int64_t most_bags, void* stream) {
  using namespace oper;
  const auto on = static_cast<cudaStream_t>(stream);
  return with_row_shape(*a, row_type, [&](auto shape) {
    using Shape = decltype(shape);
    return start<typename Shape::Row, Shape::kBytes, Shape::kLanes>(*a, features, most_bags, on);
  });
}
