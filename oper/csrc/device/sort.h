// Sorts on a device.
#pragma once

#include <ATen/core/Tensor.h>

#include "oper/cuda/launchers.h"

namespace oper {

// Sorts words and finds their runs, with scratch that is made here. The words are then in the first
// or the second of what is given, which is returned, and the slots of the runs in the other's
// memory; `options` are those of the device's tensors.
int sort_words(SortArguments& arguments, const at::TensorOptions& options, void* stream);

}  // namespace oper
