// torch.ops.oper.wait_words and post_word: the counters of a board, by which ranks wait for others.

#include "oper/comm/futex.h"

#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <limits>

namespace oper {
namespace {

Word* words_of(const at::Tensor& words) {
  TORCH_CHECK_TYPE(words.scalar_type() == at::kInt, "words: dtype ", words.scalar_type(),
                   ", and int32 was needed");
  TORCH_CHECK_VALUE(words.dim() == 2 && words.size(1) == 16 && words.is_contiguous(),
                    "words: lines of 16 int32 were needed");
  void* first = words.data_ptr();
  TORCH_CHECK_VALUE(reinterpret_cast<uintptr_t>(first) % sizeof(Word) == 0,
                    "words: must begin on a cache line");
  return static_cast<Word*>(first);
}

int32_t as_value(int64_t value) {
  TORCH_CHECK_VALUE(
      value >= std::numeric_limits<int32_t>::min() && value <= std::numeric_limits<int32_t>::max(),
      "value: ", value, " is no int32");
  return static_cast<int32_t>(value);
}

int64_t wait_words(const at::Tensor& words, int64_t value, int64_t timeout_ms) {
  return wait_for_all(words_of(words), words.size(0), as_value(value), timeout_ms);
}

void post_word(const at::Tensor& words, int64_t index, int64_t value) {
  TORCH_CHECK_INDEX(index >= 0 && index < words.size(0), "index: ", index, " is none of ",
                    words.size(0), " words");
  post(words_of(words)[index], as_value(value));
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(oper, m) {
  m.def("wait_words(Tensor words, int value, int timeout_ms) -> int");
  m.def("post_word(Tensor(a!) words, int index, int value) -> ()");
}

TORCH_LIBRARY_IMPL(oper, CPU, m) {
  m.impl("wait_words", wait_words);
  m.impl("post_word", post_word);
}

}  // namespace oper
