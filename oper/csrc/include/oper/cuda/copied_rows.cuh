// Rows that are copied to where others fetch them from, or this rank reads them, and the addresses
// of the accesses that read them there.
#pragma once

#include "oper/cuda/device.h"
#include "oper/cuda/launchers.h"
#include "oper/cuda/search.cuh"

namespace oper {

template <int kBytes>
__device__ __forceinline__ void copy_word(const uint8_t* from, uint8_t* to, int64_t word) {
  store(to + word * kBytes, load_row<kBytes>(from + word * kBytes));
}

// The rows of all pieces, a thread a word: those of a row are neighbours.
__global__ void __launch_bounds__(256) copy_rows(const __grid_constant__ CopyArguments a) {
  const int64_t n = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (n >= a.words) return;
  const int64_t number = last_at_most(a.begins, 0, a.pieces, n);
  const CopiedPiece& piece = a.piece[number];
  const int64_t in_piece = n - a.begins[number];
  const int64_t row = in_piece / piece.row_words, word = in_piece % piece.row_words;
  const uint8_t* const from = piece.arena + a.slots[piece.first + row] * piece.row_bytes;
  uint8_t* const to = piece.out + row * piece.row_bytes;
  switch (piece.row_bytes / piece.row_words) {
    case 16: copy_word<16>(from, to, word); break;
    case 8: copy_word<8>(from, to, word); break;
    case 4: copy_word<4>(from, to, word); break;
    case 2: copy_word<2>(from, to, word); break;
    default: to[word] = from[word];
  }
  if (a.targets && word == 0) a.targets[piece.first + row] = piece.target + row;
}

// Addresses of the accesses of runs with a target, which is not negative: a thread an access.
__global__ void __launch_bounds__(256) redirect(const __grid_constant__ RedirectArguments a) {
  const int64_t n = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (n >= a.run_start[a.runs]) return;
  const int64_t target = a.targets[last_at_most(a.run_start, 0, a.runs, n)];
  if (target >= 0) a.addresses[a.positions[n]] = target;
}

}  // namespace oper
