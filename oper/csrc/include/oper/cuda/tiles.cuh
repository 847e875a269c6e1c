// The bags of a launch's features as one row of tiles, which a grid shares out whatever the numbers
// of features and of bags are.
//
// A tile is as many bags of one feature as a block takes at once. A grid has a block for each tile,
// and no more blocks than the device holds at once: a block beyond those would start when the first
// ones end, and run almost alone.
#pragma once

#include <algorithm>
#include <cstdint>

#include "oper/common/simd.h"
#include "oper/cuda/device.h"
#include "oper/cuda/launchers.h"

namespace oper {

constexpr int64_t kMostTiles = int64_t{1} << 30;  // so that a kernel counts on from any of them

// Cuts the bags of so many features into tiles of `of_tile` bags. False if there are too many.
inline bool cut_tiles(RowArguments& a, int64_t features, int64_t of_tile) {
  int64_t tiles = 0;
  for (int64_t f = 0; f <= kMostFeatures; ++f) {
    if (tiles > kMostTiles) return false;
    a.first_tile[f] = static_cast<int32_t>(tiles);
    if (f < features) tiles += (a.features[f].bags + of_tile - 1) / of_tile;
  }
  return true;
}

// All tiles of a launch.
OPER_HD inline int tiles_of(const RowArguments& a) { return a.first_tile[kMostFeatures]; }

// Moves `feature` on to the one that has a tile, which is not before its own ones.
__device__ __forceinline__ void go_to_tile(const RowArguments& a, int tile, int& feature) {
  while (tile >= a.first_tile[feature + 1]) ++feature;
}

// Calls f(feature, bag of the feature) for the bag of a group of threads in every gridDim.x-th
// tile, so that all blocks have bags of all features, however different their numbers of bags are.
// The last tile of a feature may have fewer bags than groups.
template <int kGroups, typename F>
__device__ __forceinline__ void for_tiles(const RowArguments& a, int group, const F& f) {
  int feature = 0;
  const int tiles = tiles_of(a);
  for (int tile = static_cast<int>(blockIdx.x); tile < tiles; tile += gridDim.x) {
    go_to_tile(a, tile, feature);
    f(a.features[feature], static_cast<int64_t>(tile - a.first_tile[feature]) * kGroups + group);
  }
}

// Cuts tiles, and starts a kernel with a block for each, or as many as there are at once.
template <typename Arguments>
cudaError_t launch_tiles(void (*kernel)(Arguments), Arguments& a, int64_t features, int64_t of_tile,
                         unsigned threads, cudaStream_t stream) {
  if (!cut_tiles(a, features, of_tile)) return cudaErrorInvalidValue;
  const int64_t blocks = std::min<int64_t>(tiles_of(a), blocks_at_once(kernel, threads));
  if (blocks == 0) return cudaSuccess;
  return launch({dim3(static_cast<unsigned>(blocks)), threads, stream}, kernel, a);
}

}  // namespace oper
