// Sorts on a device.
#pragma once

#include <ATen/core/Tensor.h>

#include "oper/cuda/launchers.h"

namespace oper {

// Words that are to be made, and what is found of them: memory for one sort on a device.
class WordSort {
 public:
  // Of `accesses` words, one or more, in such fields. `beside`: what accesses are called lies
  // beside the words. `options` are those of the device's int64 tensors.
  WordSort(int64_t accesses, const WordLayout& layout, bool beside,
           const at::TensorOptions& options);

  // Where the words, and the numbers beside them, are to be written; null where they are in the
  // words.
  uint64_t* words() const { return arguments.words[0]; }
  int32_t* numbers() const { return arguments.numbers[0]; }

  // Sorts the words and finds their runs.
  void run(void* stream);

  // Afterwards: the words, what accesses are called in their order, where runs start and their
  // slots, and how many runs come before each group.
  const at::Tensor& sorted_words() const { return word[sorted]; }
  const at::Tensor& positions() const { return called[arguments.numbers[0] ? sorted : 0]; }
  const at::Tensor& run_start() const { return starts; }
  const at::Tensor& run_slot() const { return word[1 - sorted]; }
  const at::Tensor& before() const { return runs_before; }

 private:
  at::Tensor word[2], called[2], starts, count, runs_before;
  SortArguments arguments{};
  int sorted = 0;
};

}  // namespace oper
