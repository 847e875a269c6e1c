// Where the gradients of a batch's rows lie on a device (step/gradient_layout.h).
//
// A bucket begins after all those before it, and its groups where their rows say. So a warp takes a
// bucket: its threads add up what the buckets before take, of which there are few, and then each
// places groups of its own. No warp waits for another, and thousands of groups take little longer
// than a few; a single thread would read them one after another.
#pragma once

#include "oper/cuda/device.h"
#include "oper/cuda/launchers.h"
#include "oper/step/gradient_layout.h"

namespace oper {

// A warp places the groups of a bucket, and after the last one the end of all.
__device__ __forceinline__ void place_bucket(const int64_t* before, const BucketDims& dims,
                                             int64_t bucket, int64_t* place) {
  const int64_t lane = threadIdx.x % kWarpThreads, of_bucket = dims.of_bucket;
  int64_t first = 0;
  for (int64_t n = lane; n < bucket; n += kWarpThreads)
    first += bucket_values(before[(n + 1) * of_bucket] - before[n * of_bucket], dims.dim[n]);
  for (int half = kWarpThreads / 2; half > 0; half /= 2)
    first += __shfl_xor_sync(0xFFFFFFFFu, first, half);
  const int64_t groups = of_bucket + (bucket + 1 == dims.buckets);
  for (int64_t n = lane; n < groups; n += kWarpThreads)
    place[bucket * of_bucket + n] =
        place_of_group(before + bucket * of_bucket, n, dims.dim[bucket], first);
}

// Groups [2, buckets · of_bucket + 1] from the rows before each.
__global__ void __launch_bounds__(256) lay_out_gradients(const __grid_constant__ BucketDims dims,
                                                         const int64_t* before, int64_t* groups) {
  const int64_t threads = static_cast<int64_t>(gridDim.x) * blockDim.x;
  const int64_t thread = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const int64_t all = dims.buckets * dims.of_bucket;
  for (int64_t n = thread; n <= all; n += threads) groups[n] = before[n];
  for (int64_t bucket = thread / kWarpThreads; bucket < dims.buckets;
       bucket += threads / kWarpThreads)
    place_bucket(before, dims, bucket, groups + all + 1);
}

}  // namespace oper
