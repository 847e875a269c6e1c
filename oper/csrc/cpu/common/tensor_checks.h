// Counters of rows as tensors: uint32, or uint64 where a counter needs more.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <cstdint>

namespace oper {

// f(Counter{}) with the counters' type.
template <typename F>
auto with_counter_type(const at::Tensor& counters, const char* name, const F& f) {
  TORCH_CHECK_TYPE(counters.scalar_type() == at::kUInt32 || counters.scalar_type() == at::kUInt64,
                   name, ": dtype ", counters.scalar_type(), ", and uint32 or uint64 was needed");
  TORCH_CHECK_VALUE(counters.dim() == 1 && counters.is_contiguous(), name,
                    ": one contiguous dimension was needed");
  return counters.scalar_type() == at::kUInt32 ? f(uint32_t{}) : f(uint64_t{});
}

// The elements of a contiguous int64 vector of `size` elements.
inline const int64_t* int64s(const at::Tensor& tensor, int64_t size, const char* name) {
  TORCH_CHECK_TYPE(tensor.scalar_type() == at::kLong, name, ": dtype ", tensor.scalar_type(),
                   ", and int64 was needed");
  TORCH_CHECK_VALUE(tensor.is_contiguous() && tensor.numel() == size, name, ": ", tensor.numel(),
                    " contiguous elements, and ", size, " were needed");
  return tensor.const_data_ptr<int64_t>();
}

// Counters of all rows of tables, or other ranges; `containing` is kept for some of them.
template <typename Counter>
struct Counters {
  const Counter* accesses;
  const Counter* containing;
  const int64_t* offsets;
  const int64_t* containing_offsets;

  const Counter* accesses_of(int64_t range) const { return accesses + offsets[range]; }

  // Null where a range keeps none, as it equals the accesses.
  const Counter* containing_of(int64_t range) const {
    return containing_offsets[range] < 0 ? nullptr : containing + containing_offsets[range];
  }
};

template <typename Counter>
Counters<Counter> counters_of(const at::Tensor& accesses, const at::Tensor& containing,
                              const at::Tensor& offsets, const at::Tensor& containing_offsets) {
  const int64_t ranges = offsets.numel() - 1;
  TORCH_CHECK_VALUE(ranges >= 0, "offsets: at least one element was needed");
  TORCH_CHECK_TYPE(containing.scalar_type() == accesses.scalar_type(),
                   "containing: the dtype of accesses was needed");
  TORCH_CHECK_VALUE(containing.is_contiguous(), "containing: must be contiguous");
  Counters<Counter> counters{
      static_cast<const Counter*>(accesses.const_data_ptr()),
      static_cast<const Counter*>(containing.const_data_ptr()),
      int64s(offsets, ranges + 1, "offsets"),
      int64s(containing_offsets, ranges, "containing_offsets"),
  };
  for (int64_t n = 0; n < ranges; ++n) {
    const int64_t rows = counters.offsets[n + 1] - counters.offsets[n];
    TORCH_CHECK_VALUE(counters.offsets[n] >= 0 && rows >= 0, "offsets: must ascend from 0");
    TORCH_CHECK_VALUE(counters.containing_offsets[n] + rows <= containing.numel() ||
                          counters.containing_offsets[n] < 0,
                      "containing: range ", n, " ends beyond its ", containing.numel(),
                      " counters");
  }
  TORCH_CHECK_VALUE(counters.offsets[ranges] <= accesses.numel(), "accesses: ", accesses.numel(),
                    " counters, and the offsets end at ", counters.offsets[ranges]);
  return counters;
}

}  // namespace oper
