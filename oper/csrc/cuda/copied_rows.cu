// oper_cuda_copy_rows and oper_cuda_redirect: start copying rows, and leading accesses there.

#include "oper/cuda/copied_rows.cuh"

extern "C" int oper_cuda_copy_rows(const oper::CopyArguments* a, void* stream) {
  return oper::launch(oper::a_thread_each(a->words, stream), oper::copy_rows, *a);
}

extern "C" int oper_cuda_redirect(const oper::RedirectArguments* a, void* stream) {
  return oper::launch(oper::a_thread_each(a->accesses, stream), oper::redirect, *a);
}
