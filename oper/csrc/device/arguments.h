// Checks of the arguments of operators on devices, by what the host knows of them.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>
#include <initializer_list>
#include <vector>

#include "cpu/common/arguments.h"
#include "device/library.h"
#include "oper/step/row_formats.h"

namespace oper {

// Bytes that a thread reads or writes at once where rows are whole pieces of so many.
constexpr int64_t kWideBytes = 4 * sizeof(float);

inline bool is_wide(const void* place) {
  return reinterpret_cast<uintptr_t>(place) % kWideBytes == 0;
}

// The type of a tensor of values that are not quantised.
inline RowType float_type(const at::Tensor& tensor, const char* name) {
  switch (tensor.scalar_type()) {
    case at::kFloat: return kFloat32;
    case at::kHalf: return kFloat16;
    case at::kBFloat16: return kBFloat16;
    default:
      OPER_CHECK_TYPE(false, name, ": expected dtype float32, float16 or bfloat16, got ",
                      tensor.scalar_type());
  }
}

// Words of the host's, list after list, on the device of other tensors, by a copy on `stream` that
// nobody waits for. Throws if the stream is captured: the copy would be made again by each run of
// the graph, from memory that others have by then.
inline at::Tensor brought(std::initializer_list<at::ArrayRef<int64_t>> lists,
                          const at::TensorOptions& on, int64_t stream) {
  check_not_captured(stream, "no memory of the host can be copied");
  int64_t size = 0;
  for (const auto& list : lists) size += static_cast<int64_t>(list.size());
  const bool is_device = on.device().is_cuda();  // not in the emulator
  const at::Tensor host =
      at::empty({size}, at::TensorOptions().dtype(at::kLong).pinned_memory(is_device));
  auto* to = host.mutable_data_ptr<int64_t>();
  for (const auto& list : lists) to = std::copy(list.begin(), list.end(), to);
  return is_device ? host.to(on.device(), /*non_blocking=*/true) : host;
}

// Appends a struct, as words of 64 bits that `brought` brings.
template <typename Struct>
void append_words(std::vector<int64_t>& words, const Struct& given) {
  static_assert(sizeof(Struct) % sizeof(int64_t) == 0);
  const size_t size = words.size();
  words.resize(size + sizeof(Struct) / sizeof(int64_t));
  std::memcpy(words.data() + size, &given, sizeof(Struct));
}

// The offsets of bags [bags + 1] among a kernel's arguments.
template <typename Arguments>
void set_offsets(const at::Tensor& offsets, Arguments& a) {
  OPER_CHECK_VALUE(offsets.numel() > 0, "offsets: expected bags + 1 elements, got none");
  with_index_type(offsets.scalar_type(), "offsets", [&](auto offset) {
    const auto* const begins = elements<decltype(offset)>(offsets, "offsets");
    if constexpr (sizeof(offset) == 4)
      a.offsets32 = begins;
    else
      a.offsets64 = begins;
  });
}

}  // namespace oper
