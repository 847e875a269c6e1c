// Which instance of a kernel reads rows of a type, dim and size: how many bytes a thread reads at
// once, and how many threads hold a row together.
#pragma once

#include "oper/cuda/device.h"
#include "oper/cuda/launchers.h"
#include "oper/cuda/row_values.cuh"

namespace oper {

template <typename OfRow, int kOfBytes, int kOfLanes>
struct RowShape {
  using Row = OfRow;
  static constexpr int kBytes = kOfBytes;
  static constexpr int kLanes = kOfLanes;
};

// A row gets as many threads as it has pieces, up to a warp.
template <typename Row, int kBytes, typename F>
cudaError_t with_lanes(const RowArguments& a, const F& f) {
  const int64_t pieces = a.dim / Values<Row, kBytes>::kCount;
  if (pieces <= 2) return f(RowShape<Row, kBytes, 2>());
  if (pieces <= 4) return f(RowShape<Row, kBytes, 4>());
  if (pieces <= 8) return f(RowShape<Row, kBytes, 8>());
  if (pieces <= 16) return f(RowShape<Row, kBytes, 16>());
  return f(RowShape<Row, kBytes, 32>());
}

// Pieces of kWide bytes where rows begin at multiples of that and are whole pieces, else of one
// value: those have as many threads as a warp, whatever the dim.
template <typename Row, int kWide, typename F>
cudaError_t with_pieces(const RowArguments& a, const F& f) {
  if (a.row_bytes % kWide == 0 && a.dim % Values<Row, kWide>::kCount == 0)
    return with_lanes<Row, kWide>(a, f);
  return f(RowShape<Row, sizeof(typename Row::Value), 32>());
}

// f(RowShape) of these rows; an error where there is no such type.
template <typename F>
cudaError_t with_row_shape(const RowArguments& a, int64_t row_type, const F& f) {
  switch (row_type) {
    case kFloat32: return with_pieces<Float32Row, 16>(a, f);
    case kFloat16: return with_pieces<Float16Row, 16>(a, f);
    case kBFloat16: return with_pieces<BFloat16Row, 16>(a, f);
    case kInt8: return with_pieces<Int8Row, 8>(a, f);
    default: return cudaErrorInvalidValue;
  }
}

}  // namespace oper
