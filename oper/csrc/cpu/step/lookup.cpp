// torch.ops.oper.pooled_rows, weight_gradients, copy_rows, redirect and redirect_numbered: reading
// rows. `stream` and `report` are a device's (device/lookup.cpp).

#include "oper/step/lookup.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros_like.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <optional>
#include <vector>

#include "cpu/common/output_buffers.h"
#include "cpu/step/batch_arguments.h"
#include "cpu/step/copied_rows.h"
#include "oper/step/pool_bags.h"
#include "schemas.h"

namespace oper {
namespace {

constexpr int64_t kTilesPerTask = 2;
constexpr int64_t kRowsPerTask = 1 << 12;
// Larger outputs are streamed: more than a core's share of the last cache, so that most of them
// would have left it by the time they are read.
constexpr int64_t kStreamedBytes = 4 << 20;

OPER_SIMD void copy(const Slice& slice, RowStream& stream, const Output& out) {
  copy_slice(slice, stream, out);
}

OPER_SIMD void pool_any(const Batch& batch, const Slice& slice, RowStream& stream,
                        const Output& out, float* scratch) {
  with_row_type(slice.feature.dtype, [&](auto row) __attribute__((always_inline)) {
    pool_slice<typename decltype(row)::type>(batch, slice, stream, out, scratch);
  });
}

OPER_SIMD void differentiate(const Batch& batch, const Slice& slice, RowStream& stream,
                             RowType grad_type, const uint8_t* grad, float* weight_grad) {
  with_row_type(slice.feature.dtype, [&](auto row) __attribute__((always_inline)) {
    with_float_type(grad_type, [&](auto of_grad) __attribute__((always_inline)) {
      differentiate_slice<typename decltype(row)::type, typename decltype(of_grad)::type>(
          batch, slice, stream, grad, weight_grad);
    });
  });
}

void pool(const Batch& batch, const Slice& slice, RowStream& stream, const Output& out) {
  std::vector<float> scratch(2 * slice.feature.dim);
#if defined(__x86_64__)
  if (kAvx2 && slice.feature.dim % 8 == 0) {
    return with_row_type(slice.feature.dtype, [&](auto row) {
      pool_avx2<typename decltype(row)::type>(batch, slice, stream, out, scratch.data());
    });
  }
#endif
  pool_any(batch, slice, stream, out, scratch.data());
}

// f(slice, stream) for every slice of the batch, with the stream at its first row.
template <typename F>
void for_each_slice(const Batch& batch, const F& f) {
  const int64_t tiles = batch.tiles();
  at::parallel_for(0, tiles, kTilesPerTask, [&](int64_t begin, int64_t end) {
    RowStream stream(batch, begin, end, tiles);
    for (int64_t tile = begin; tile < end; ++tile)
      for (int64_t n = 0; n < batch.feature_count; ++n) f(Slice(batch, n, tile, tiles), stream);
    finish_stream();
    stream.check();
  });
}

at::Tensor pooled_rows(const at::Tensor& addresses, const std::optional<at::Tensor>& offsets,
                       const std::optional<at::Tensor>& weights, const at::Tensor& features,
                       const at::Tensor& bases, int64_t rank, int64_t out_elements,
                       at::ScalarType out_dtype, int64_t, const std::optional<at::Tensor>&) {
  const Batch batch = batch_of(addresses, offsets, weights, features, bases, rank);
  const RowType type = output_type(out_dtype);
  const int64_t written = check_features(batch.features, batch.feature_count,
                                         bags_of(addresses, offsets), bases.size(0), out_elements);
  at::Tensor result = pooled_tensor(out_elements, out_dtype);
  if (written < out_elements) result.zero_();
  const Output out{static_cast<uint8_t*>(result.data_ptr()), type,
                   static_cast<int64_t>(result.nbytes()) > kStreamedBytes};
  for_each_slice(batch, [&](const Slice& slice, RowStream& stream) {
    const bool unchanged = slice.feature.dtype == type && !weights && holds_one_each(batch, slice);
    if (unchanged && out.streams(slice.feature)) return stream_slice(slice, stream, out);
    unchanged ? copy(slice, stream, out) : pool(batch, slice, stream, out);
  });
  return result;
}

at::Tensor pooled_rows_shape(const at::Tensor& addresses, const std::optional<at::Tensor>&,
                             const std::optional<at::Tensor>&, const at::Tensor&, const at::Tensor&,
                             int64_t, c10::SymInt out_elements, at::ScalarType out_dtype, int64_t,
                             const std::optional<at::Tensor>&) {
  return at::empty_symint({std::move(out_elements)}, addresses.options().dtype(out_dtype));
}

at::Tensor weight_gradients(const at::Tensor& grad, const at::Tensor& addresses,
                            const std::optional<at::Tensor>& offsets, const at::Tensor& weights,
                            const at::Tensor& features, const at::Tensor& bases, int64_t rank,
                            int64_t, const std::optional<at::Tensor>&) {
  const Batch batch = batch_of(addresses, offsets, weights, features, bases, rank);
  check_features(batch.features, batch.feature_count, bags_of(addresses, offsets), bases.size(0),
                 grad.numel());
  check_contiguous(grad, "grad");
  at::Tensor result = at::zeros_like(weights);
  const RowType type = output_type(grad.scalar_type());
  const auto* const from = static_cast<const uint8_t*>(grad.const_data_ptr());
  float* const to = result.data_ptr<float>();
  for_each_slice(batch, [&](const Slice& slice, RowStream& stream) {
    differentiate(batch, slice, stream, type, from, to);
  });
  return result;
}

at::Tensor weight_gradients_shape(const at::Tensor&, const at::Tensor&,
                                  const std::optional<at::Tensor>&, const at::Tensor& weights,
                                  const at::Tensor&, const at::Tensor&, int64_t, int64_t,
                                  const std::optional<at::Tensor>&) {
  return at::empty_like(weights);
}

// Rows by their slots, which others fetch from here, or this rank from others: of each piece those
// of one arena, one after another to its place in `out`. Where there are targets, those of a
// piece's rows are called[n] and on.
void copy_rows(const at::Tensor& slots, at::IntArrayRef firsts, at::IntArrayRef counts,
               at::IntArrayRef arenas, at::IntArrayRef row_bytes, at::Tensor& out,
               at::IntArrayRef places, const std::optional<at::Tensor>& targets,
               at::IntArrayRef called, int64_t) {
  const int64_t* const all = elements<int64_t>(slots, "slots");
  for_copied_rows(slots, firsts, counts, arenas, row_bytes, out, places, targets, called,
                  [&](const CopiedRows& of) {
                    const int64_t* const slot = all + of.first;
                    at::parallel_for(0, of.count, kRowsPerTask, [&](int64_t begin, int64_t end) {
                      for (int64_t n = begin; n < end; ++n) {
                        const int64_t next = slot[std::min(n + kRowsPerBlock, end - 1)];
                        const uint8_t* const ahead = of.arena + next * of.row_bytes;
                        for (int64_t byte = 0; byte < of.row_bytes; byte += 64)
                          __builtin_prefetch(ahead + byte);
                        std::memcpy(of.out + n * of.row_bytes, of.arena + slot[n] * of.row_bytes,
                                    of.row_bytes);
                      }
                    });
                    if (targets) {
                      auto* const target = targets->mutable_data_ptr<int64_t>() + of.first;
                      std::iota(target, target + of.count, of.called);
                    }
                  });
}

// Accesses of fetched rows read them where they were fetched to: those of run r at targets[r], and
// where they did if that is negative.
void redirect(at::Tensor& addresses, const at::Tensor& positions, const at::Tensor& run_start,
              const at::Tensor& targets, int64_t) {
  int64_t* const to = writable_elements<int64_t>(addresses, 0, "addresses");
  const int32_t* const position = elements<int32_t>(positions, "positions");
  const int64_t runs = targets.numel();
  const int64_t* const target = elements<int64_t>(targets, runs, "targets");
  const int32_t* const start = elements<int32_t>(run_start, runs + 1, "run_start");
  check_offsets_within(start, runs, positions.numel(), "run_start", "positions");
  for (int64_t run = 0; run < runs; ++run) {
    if (target[run] < 0) continue;
    for (int64_t n = start[run]; n < start[run + 1]; ++n) {
      check_index(position[n], addresses.numel(), "positions", "accesses");
      to[position[n]] = target[run];
    }
  }
}

// `size` addresses as their rows' targets say, or else as they are; whether all rows are below
// `rows`. Which rows were fetched is as good as random, so that masks take half of branches' time.
bool redirect_each(const int64_t* from, const int32_t* row, int64_t size, const int64_t* target,
                   uint32_t rows, int64_t* to) {
  uint64_t wrong = 0;
  for (int64_t n = 0; n < size; ++n) {
    const auto number = static_cast<uint32_t>(row[n]);
    const uint64_t is_row = -static_cast<uint64_t>(number < rows);
    wrong |= ~is_row & static_cast<uint64_t>(row[n] >= 0);
    const auto found = static_cast<uint64_t>(target[number & is_row]);
    const uint64_t stays = -(found >> 63) | ~is_row;
    to[n] = static_cast<int64_t>((found & ~stays) | (static_cast<uint64_t>(from[n]) & stays));
  }
  return wrong == 0;
}

// Addresses of the accesses of fetched rows as above, where each access has the number of its row,
// or a negative one.
at::Tensor redirect_numbered(const at::Tensor& addresses, const at::Tensor& row_of,
                             const at::Tensor& targets) {
  const int64_t accesses = addresses.numel(), rows = targets.numel();
  const int64_t* const from = elements<int64_t>(addresses, "addresses");
  const int32_t* const row = elements<int32_t>(row_of, accesses, "row_of");
  const int64_t* const target = elements<int64_t>(targets, rows, "targets");
  check_size(rows, 0, kMostRows, "targets");
  const int64_t none = -1;
  at::Tensor found = pooled_tensor(accesses, at::kLong);
  int64_t* const to = found.mutable_data_ptr<int64_t>();
  at::parallel_for(0, accesses, kRowsPerTask, [&](int64_t begin, int64_t end) {
    OPER_CHECK_INDEX(
        redirect_each(from + begin, row + begin, end - begin, rows > 0 ? target : &none,
                      static_cast<uint32_t>(rows), to + begin),
        "row_of: one is none of ", rows, " rows");
  });
  return found;
}

void copy_rows_shape(const at::Tensor&, at::IntArrayRef, at::IntArrayRef, at::IntArrayRef,
                     at::IntArrayRef, at::Tensor&, at::IntArrayRef,
                     const std::optional<at::Tensor>&, at::IntArrayRef, int64_t) {}

void redirect_shape(at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&, int64_t) {
}

at::Tensor redirect_numbered_shape(const at::Tensor& addresses, const at::Tensor&,
                                   const at::Tensor&) {
  return at::empty_like(addresses);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(oper, m) {
  m.def(oper::schemas::kPooledRows);
  m.def(oper::schemas::kWeightGradients);
  m.def(oper::schemas::kCopyRows);
  m.def(oper::schemas::kRedirect);
  m.def("redirect_numbered(Tensor addresses, Tensor row_of, Tensor targets) -> Tensor");
}

TORCH_LIBRARY_IMPL(oper, CPU, m) {
  m.impl("pooled_rows", pooled_rows);
  m.impl("weight_gradients", weight_gradients);
  m.impl("copy_rows", copy_rows);
  m.impl("redirect", redirect);
  m.impl("redirect_numbered", redirect_numbered);
}

TORCH_LIBRARY_IMPL(oper, Meta, m) {
  m.impl("pooled_rows", pooled_rows_shape);
  m.impl("weight_gradients", weight_gradients_shape);
  m.impl("copy_rows", copy_rows_shape);
  m.impl("redirect", redirect_shape);
  m.impl("redirect_numbered", redirect_numbered_shape);
}

}  // namespace oper
