// Random gathers of rows, the ceiling of any lookup: nothing is computed but a sum that keeps the
// compiler from leaving the reads out. Lanes of 16 bytes hold a row, kRows rows are read at once.

#include <cstdint>

namespace {

template <int kRows>
__global__ void __launch_bounds__(256)
    gather(const uint4* arena, const int64_t* slots, int64_t count, int lanes, uint4* out) {
  const int64_t thread = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const int64_t groups = static_cast<int64_t>(gridDim.x) * blockDim.x / lanes;
  const int lane = static_cast<int>(thread % lanes);
  uint4 sum = make_uint4(0, 0, 0, 0);
  for (int64_t first = thread / lanes; first < count; first += kRows * groups) {
    uint4 row[kRows];
#pragma unroll
    for (int u = 0; u < kRows; ++u) {
      const int64_t n = first + u * groups < count ? first + u * groups : first;
      row[u] = __ldcs(arena + slots[n] * lanes + lane);
    }
#pragma unroll
    for (int u = 0; u < kRows; ++u)
      sum = make_uint4(sum.x ^ row[u].x, sum.y ^ row[u].y, sum.z ^ row[u].z, sum.w ^ row[u].w);
  }
  out[thread] = sum;
}

}  // namespace

// `lanes` is row bytes / 16; `out` has 16 bytes for each thread of blocks of 256.
extern "C" int oper_gather(const void* arena, const int64_t* slots, int64_t count, int lanes,
                           int rows, unsigned blocks, void* out, void* stream) {
  const auto* const from = static_cast<const uint4*>(arena);
  auto* const to = static_cast<uint4*>(out);
  const auto on = static_cast<cudaStream_t>(stream);
  switch (rows) {
    case 1: gather<1><<<blocks, 256, 0, on>>>(from, slots, count, lanes, to); break;
    case 2: gather<2><<<blocks, 256, 0, on>>>(from, slots, count, lanes, to); break;
    case 4: gather<4><<<blocks, 256, 0, on>>>(from, slots, count, lanes, to); break;
    case 8: gather<8><<<blocks, 256, 0, on>>>(from, slots, count, lanes, to); break;
    default: return cudaErrorInvalidValue;
  }
  return cudaGetLastError();
}
