// Outputs in blocks of memory that are kept when their tensors die.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace oper {

// An uninitialised tensor [elements], aligned to a line of the cache. A large one is a block of the
// pool, which gets it back when the tensor's storage dies, on whatever thread.
at::Tensor pooled_tensor(int64_t elements, at::ScalarType type);

}  // namespace oper
