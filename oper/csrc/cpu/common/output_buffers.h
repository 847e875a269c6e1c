// Outputs in blocks of memory that are kept when their tensors are freed.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace oper {

// An uninitialised tensor [elements], aligned to a line of the cache. A large one is a block of the
// pool, to which it returns when the tensor's storage is freed, on any thread.
at::Tensor pooled_tensor(int64_t elements, at::ScalarType type);

}  // namespace oper
