// Pieces of other ranks' symmetric memory, brought into a buffer here: a warp a piece. It asks for
// its pieces, one after another, and waits for all of them at the end, by one thread.
#pragma once

#include "oper/nvshmem/calls.h"
#include "oper/nvshmem/launchers.h"

namespace oper {

__global__ void __launch_bounds__(256) get_pieces(const __grid_constant__ PiecesArguments a) {
  const int64_t warps = static_cast<int64_t>(gridDim.x) * blockDim.x / kWarpThreads;
  const int64_t mine = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) / kWarpThreads;
  bool asked = false;
  for (int64_t n = mine; n < a.size; n += warps) {
    const RemotePiece& piece = a.pieces[n];
    nvshmemx_getmem_nbi_warp(a.buffer + piece.to, a.source + piece.from,
                             static_cast<size_t>(piece.bytes), static_cast<int>(piece.rank));
    asked = true;
  }
  __syncwarp(0xFFFFFFFFu);  // all threads have asked
  if (asked && threadIdx.x % kWarpThreads == 0) nvshmem_quiet();
}

}  // namespace oper
