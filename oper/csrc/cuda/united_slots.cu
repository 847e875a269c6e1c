// oper_cuda_list_words and oper_cuda_find_united: start making words of lists of slots, and finding
// rows among united ones.

#include "oper/cuda/united_slots.cuh"

extern "C" int oper_cuda_list_words(const oper::ListedArguments* a, void* stream) {
  return oper::launch(oper::a_thread_each(a->slots, stream), oper::list_words, *a);
}

extern "C" int oper_cuda_find_united(const oper::FoundArguments* a, void* stream) {
  return oper::launch(oper::a_thread_each(a->rows, stream), oper::find_united, *a);
}
