// oper_cuda_lookup: starts the lookup of features of one shape of rows.

#include "oper/cuda/lookup.cuh"

#include <algorithm>

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
  return a.weights ? launch(how, pool_bags<Row, kBytes, kLanes, kRows, true>, a)
                   : launch(how, pool_bags<Row, kBytes, kLanes, kRows, false>, a);
}

// A row gets as many threads as it has pieces, up to a warp.
template <typename Row, int kBytes>
cudaError_t with_lanes(const LookupArguments& a, int64_t features, int64_t most_bags,
                       cudaStream_t stream) {
  const int64_t pieces = a.dim / Values<Row, kBytes>::kCount;
  if (pieces <= 2) return start<Row, kBytes, 2>(a, features, most_bags, stream);
  if (pieces <= 4) return start<Row, kBytes, 4>(a, features, most_bags, stream);
  if (pieces <= 8) return start<Row, kBytes, 8>(a, features, most_bags, stream);
  if (pieces <= 16) return start<Row, kBytes, 16>(a, features, most_bags, stream);
  return start<Row, kBytes, 32>(a, features, most_bags, stream);
}

// Pieces of kWide bytes where rows begin at multiples of that and are whole pieces, else of one
// value: those have as many threads as a warp, whatever the dim.
template <typename Row, int kWide>
cudaError_t with_pieces(const LookupArguments& a, int64_t features, int64_t most_bags,
                        cudaStream_t stream) {
  if (a.row_bytes % kWide == 0 && a.dim % Values<Row, kWide>::kCount == 0)
    return with_lanes<Row, kWide>(a, features, most_bags, stream);
  return start<Row, sizeof(typename Row::Value), 32>(a, features, most_bags, stream);
}

}  // namespace
}  // namespace oper

extern "C" int oper_cuda_lookup(const oper::LookupArguments* a, int64_t row_type, int64_t features,
                                int64_t most_bags, void* stream) {
  using namespace oper;
  const auto on = static_cast<cudaStream_t>(stream);
  switch (row_type) {
    case kFloat32: return with_pieces<Float32Row, 16>(*a, features, most_bags, on);
    case kFloat16: return with_pieces<Float16Row, 16>(*a, features, most_bags, on);
    case kBFloat16: return with_pieces<BFloat16Row, 16>(*a, features, most_bags, on);
    case kInt8: return with_pieces<Int8Row, 8>(*a, features, most_bags, on);
    default: return cudaErrorInvalidValue;
  }
}
