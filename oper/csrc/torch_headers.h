// What nearly all files of the extension include of torch, precompiled by setup.py. Files include
// what they use all the same, so that each can be compiled by itself.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>
