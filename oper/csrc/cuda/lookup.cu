// oper_cuda_lookup: starts the lookup of features of one shape of rows.

#include "oper/cuda/lookup.cuh"

#include <algorithm>

#include "oper/cuda/row_shapes.h"

namespace oper {
namespace {

// Reads of a row on their way: two would do for the latency of HBM, four are double that, and more
// cost registers and so occupancy.
constexpr int kRows = 4;
// Reads on their way where most bags have one row; more would not fit the registers of rows of
// eight values a piece.
template <typename Row>
constexpr int kShortBags = sizeof(typename Row::Value) == 2 ? 2 : 3;
constexpr int64_t kMostShortBags = int64_t{1} << 30;

bool has_short_bags(const LookupArguments& a, int64_t features) {
  const auto few = [](const LookupFeature& feature) { return feature.bags <= kMostShortBags; };
  return a.short_bags && std::all_of(a.features, a.features + features, few);
}

template <typename Row, int kBytes, int kLanes>
cudaError_t start(LookupArguments& a, int64_t features, cudaStream_t stream) {
  constexpr int64_t kGroups = kLookupThreads / kLanes;
  if (has_short_bags(a, features))
    return launch_tiles(pool_short_bags<Row, kBytes, kLanes, kShortBags<Row>>, a, features,
                        kGroups * kShortBags<Row>, kLookupThreads, stream);
  return launch_tiles(a.weights ? pool_bags<Row, kBytes, kLanes, kRows, true, Mapped>
                                : pool_bags<Row, kBytes, kLanes, kRows, false, Mapped>,
                      a, features, kGroups, kLookupThreads, stream);
}

}  // namespace
}  // namespace oper

extern "C" int oper_cuda_lookup(oper::LookupArguments* a, int64_t row_type, int64_t features,
                                void* stream) {
  using namespace oper;
  const auto on = static_cast<cudaStream_t>(stream);
  return with_row_shape(*a, row_type, [&](auto shape) {
    using Shape = decltype(shape);
    return start<typename Shape::Row, Shape::kBytes, Shape::kLanes>(*a, features, on);
  });
}
