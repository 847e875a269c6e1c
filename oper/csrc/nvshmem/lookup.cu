// oper_nvshmem_lookup: starts the lookup of features of one shape of rows, some of which other
// nodes have.

#include <algorithm>

#include "oper/cuda/row_shapes.h"
#include "oper/nvshmem/row_gets.cuh"

namespace oper {
namespace {

constexpr int kRows = 4;  // as cuda/lookup.cu has them

template <typename Row, int kBytes, int kLanes>
cudaError_t start(GetArguments& a, int64_t features, cudaStream_t stream) {
  constexpr int64_t kGroups = kLookupThreads / kLanes;  // of a block
  if (!cut_tiles(a, features, kGroups)) return cudaErrorInvalidValue;
  if (tiles_of(a) == 0) return cudaSuccess;
  const auto kernel = a.weights ? pool_bags<Row, kBytes, kLanes, kRows, true, Gets>
                                : pool_bags<Row, kBytes, kLanes, kRows, false, Gets>;
  // Fewer blocks than are there at once, if rows are so long that the stage has no room for one of
  // each group.
  const int64_t room = a.stage_bytes / (kGroups * a.row_bytes);
  const int64_t blocks =
      std::min({int64_t{tiles_of(a)}, blocks_at_once(kernel, kLookupThreads), room});
  if (blocks == 0) return cudaErrorInvalidValue;
  a.chunk = a.stage_bytes / (blocks * kGroups * a.row_bytes);
  return launch({dim3(static_cast<unsigned>(blocks)), kLookupThreads, stream}, kernel, a);
}

}  // namespace
}  // namespace oper

extern "C" int oper_nvshmem_lookup(oper::GetArguments* a, int64_t row_type, int64_t features,
                                   void* stream) {
  using namespace oper;
  const auto on = static_cast<cudaStream_t>(stream);
  return with_row_shape(*a, row_type, [&](auto shape) {
    using Shape = decltype(shape);
    return start<typename Shape::Row, Shape::kBytes, Shape::kLanes>(*a, features, on);
  });
}
