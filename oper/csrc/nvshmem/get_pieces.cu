// oper_nvshmem_get_pieces: starts the fetch of pieces of other ranks' memory.

#include "oper/nvshmem/get_pieces.cuh"

#include <algorithm>

extern "C" int oper_nvshmem_get_pieces(const oper::PiecesArguments* a, void* stream) {
  using namespace oper;
  constexpr unsigned kThreads = 256;
  constexpr int64_t kPieces = kThreads / kWarpThreads;  // of a block at once
  if (a->size == 0) return cudaSuccess;
  const int64_t blocks =
      std::min((a->size + kPieces - 1) / kPieces, blocks_at_once(get_pieces, kThreads));
  const Launch how{dim3(static_cast<unsigned>(blocks)), kThreads,
                   static_cast<cudaStream_t>(stream)};
  return launch(how, get_pieces, *a);
}
