// torch.ops.oper.quantise_rows and dequantise_rows: fp32 rows to row-wise 8-bit ones and back.

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "cpu/common/arguments.h"
#include "oper/step/row_formats.h"

namespace oper {
namespace {

constexpr int64_t kQuantisedRowsPerTask = 1 << 12;

OPER_SIMD void quantise(const float* values, int64_t dim, uint8_t* row) {
  quantise_row(values, dim, row);
}

OPER_SIMD void dequantise(const uint8_t* row, int64_t dim, float* values) {
  const Int8Row from(row, dim);
  for (int64_t d = 0; d < dim; ++d) values[d] = from[d];
}

at::Tensor quantise_rows_shape(const at::Tensor& values) {
  return at::empty_symint({values.sym_size(0), values.sym_size(1) + kInt8ExtraBytes},
                          values.options().dtype(at::kByte));
}

at::Tensor dequantise_rows_shape(const at::Tensor& rows) {
  return at::empty_symint({rows.sym_size(0), rows.sym_size(1) - kInt8ExtraBytes},
                          rows.options().dtype(at::kFloat));
}

at::Tensor quantise_rows(const at::Tensor& values) {
  OPER_CHECK_VALUE(values.dim() == 2, "values: expected [rows, dim], got ", values.sizes());
  const at::Tensor contiguous = values.contiguous();
  const float* const from = elements<float>(contiguous, "values");
  at::Tensor rows = quantise_rows_shape(contiguous);
  const int64_t dim = values.size(1), row_bytes = rows.size(1);
  uint8_t* const to = rows.data_ptr<uint8_t>();
  at::parallel_for(0, values.size(0), kQuantisedRowsPerTask, [&](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n) quantise(from + n * dim, dim, to + n * row_bytes);
  });
  return rows;
}

at::Tensor dequantise_rows(const at::Tensor& rows) {
  OPER_CHECK_VALUE(
      rows.dim() == 2 && rows.scalar_type() == at::kByte && rows.size(1) >= kInt8ExtraBytes,
      "rows: expected uint8 [rows, dim + ", kInt8ExtraBytes, "], got ", rows.scalar_type(), " ",
      rows.sizes());
  const at::Tensor contiguous = rows.contiguous();
  at::Tensor values = dequantise_rows_shape(contiguous);
  const int64_t dim = values.size(1), row_bytes = rows.size(1);
  const uint8_t* const from = contiguous.const_data_ptr<uint8_t>();
  float* const to = values.data_ptr<float>();
  at::parallel_for(0, rows.size(0), kQuantisedRowsPerTask, [&](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n) dequantise(from + n * row_bytes, dim, to + n * dim);
  });
  return values;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(oper, m) {
  m.def("quantise_rows(Tensor values) -> Tensor");
  m.def("dequantise_rows(Tensor rows) -> Tensor");
}

TORCH_LIBRARY_IMPL(oper, CPU, m) {
  m.impl("quantise_rows", quantise_rows);
  m.impl("dequantise_rows", dequantise_rows);
}

TORCH_LIBRARY_IMPL(oper, Meta, m) {
  m.impl("quantise_rows", quantise_rows_shape);
  m.impl("dequantise_rows", dequantise_rows_shape);
}

}  // namespace oper
