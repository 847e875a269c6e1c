// oper_nvshmem_fetch_rows: starts the fetch of a bucket's distinct rows.

#include "oper/nvshmem/fetch_rows.cuh"

// How many rows there are is the device's to know: as many warps as are there at once.
extern "C" int oper_nvshmem_fetch_rows(const oper::FetchArguments* a, void* stream) {
  using namespace oper;
  constexpr unsigned kThreads = 256;
  const auto blocks = static_cast<unsigned>(blocks_at_once(fetch_rows, kThreads));
  const Launch how{dim3(blocks), kThreads, static_cast<cudaStream_t>(stream)};
  return launch(how, fetch_rows, *a);
}
