// The Python module `oper._C`: importing it registers the operators of `torch.ops.oper`.
//
// Each operator is declared and bound where it is written, in cpu/STAGE/NAME.cpp, by
// TORCH_LIBRARY_FRAGMENT(oper, m) and TORCH_LIBRARY_IMPL(oper, CPU, m); its kernel lies in
// include/oper/STAGE/NAME.h, which includes nothing of torch and takes raw pointers.

#include <Python.h>
#include <torch/library.h>

TORCH_LIBRARY(oper, m) {}

PyMODINIT_FUNC PyInit__C() {
  static PyModuleDef module = {PyModuleDef_HEAD_INIT, "_C", nullptr, -1, nullptr};
  return PyModule_Create(&module);
}
