// torch.ops.oper.exp, expm1, log, log1p, log_gamma and ordered_product: float64 arithmetic with the
// same bits on every processor (oper/base/portable_math.py).

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <algorithm>
#include <cstdint>

#include "cpu/common/arguments.h"
#include "cpu/common/parallel.h"
#include "oper/common/elementary.h"
#include "oper/common/simd.h"

namespace oper {
namespace {

constexpr int64_t kValuesPerTask = 1 << 16;
constexpr int64_t kProductsPerTask = 1 << 16;

// The values of a function at x[0 .. count), by its formula without branches first.
template <class Function>
inline void fill_values(const double* x, int64_t count, double* to) {
  int64_t plain = 0;
  for (int64_t i = 0; i < count; ++i) {
    to[i] = Function::plain(x[i]);
    plain += Function::is_plain(x[i]);
  }
  if (plain == count) return;
  for (int64_t i = 0; i < count; ++i) {
    if (!Function::is_plain(x[i])) to[i] = Function::rest(x[i]);
  }
}

OPER_SIMD void fill_exp(const double* x, int64_t count, double* to) {
  fill_values<Exp>(x, count, to);
}
OPER_SIMD void fill_expm1(const double* x, int64_t count, double* to) {
  fill_values<Expm1>(x, count, to);
}
OPER_SIMD void fill_log(const double* x, int64_t count, double* to) {
  fill_values<Log>(x, count, to);
}
OPER_SIMD void fill_log1p(const double* x, int64_t count, double* to) {
  fill_values<Log1p>(x, count, to);
}
void fill_log_gamma(const double* x, int64_t count, double* to) {
  for (int64_t i = 0; i < count; ++i) to[i] = portable_log_gamma(x[i]);
}

template <void (*fill)(const double*, int64_t, double*)>
at::Tensor each(const at::Tensor& x) {
  const double* const values = elements<double>(x, "x");
  at::Tensor out = at::empty_like(x);
  double* const to = out.data_ptr<double>();
  const int64_t size = x.numel();
  share_out((size + kValuesPerTask - 1) / kValuesPerTask, [&](const auto& next) {
    for (int64_t task = next(); task >= 0; task = next()) {
      const int64_t first = task * kValuesPerTask;
      fill(values + first, std::min(size - first, kValuesPerTask), to + first);
    }
  });
  return out;
}

// Row i of a times b: the terms are added in the order of k, whatever the width of vectors.
OPER_SIMD void row_product(const double* a, const double* b, int64_t terms, int64_t columns,
                           double* to) {
  if (columns == 1) {
    double sum = 0.0;
    for (int64_t k = 0; k < terms; ++k) sum += a[k] == 0.0 ? 0.0 : a[k] * b[k];
    *to = sum;
    return;
  }
  for (int64_t k = 0; k < terms; ++k) {
    const double factor = a[k];
    if (factor == 0.0) continue;
    const double* const row = b + k * columns;
    for (int64_t j = 0; j < columns; ++j) to[j] += factor * row[j];
  }
}

// a [n, k] times b [k, m]. Zeros of `a` add nothing, also where `b` is infinite.
at::Tensor ordered_product(const at::Tensor& a, const at::Tensor& b) {
  OPER_CHECK_VALUE(a.dim() == 2 && b.dim() == 2, "a, b: expected matrices, got ", a.dim(), " and ",
                   b.dim(), " dimensions");
  const int64_t rows = a.size(0), terms = a.size(1), columns = b.size(1);
  const double* const of_a = elements<double>(a, "a");
  const double* const of_b = elements<double>(b, terms * columns, "b");
  OPER_CHECK_VALUE(b.size(0) == terms, "b: expected ", terms, " rows, got ", b.size(0));
  at::Tensor out = at::zeros({rows, columns}, a.options());
  double* const to = out.data_ptr<double>();
  const int64_t a_task =
      std::max<int64_t>(1, kProductsPerTask / std::max<int64_t>(1, terms * columns));
  share_out((rows + a_task - 1) / a_task, [&](const auto& next) {
    for (int64_t task = next(); task >= 0; task = next()) {
      const int64_t end = std::min(rows, (task + 1) * a_task);
      for (int64_t i = task * a_task; i < end; ++i) {
        row_product(of_a + i * terms, of_b, terms, columns, to + i * columns);
      }
    }
  });
  return out;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(oper, m) {
  m.def("exp(Tensor x) -> Tensor");
  m.def("expm1(Tensor x) -> Tensor");
  m.def("log(Tensor x) -> Tensor");
  m.def("log1p(Tensor x) -> Tensor");
  m.def("log_gamma(Tensor x) -> Tensor");
  m.def("ordered_product(Tensor a, Tensor b) -> Tensor");
}

TORCH_LIBRARY_IMPL(oper, CPU, m) {
  m.impl("exp", each<fill_exp>);
  m.impl("expm1", each<fill_expm1>);
  m.impl("log", each<fill_log>);
  m.impl("log1p", each<fill_log1p>);
  m.impl("log_gamma", each<fill_log_gamma>);
  m.impl("ordered_product", ordered_product);
}

}  // namespace oper
