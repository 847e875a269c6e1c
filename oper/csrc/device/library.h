// The library of device kernels, oper/_cuda.so: loaded when a device is first used, so that this
// extension is one binary for machines with and without one, and knows nothing of CUDA's headers.
#pragma once

#include <ATen/core/Tensor.h>

#include <initializer_list>
#include <optional>
#include <string>
#include <utility>

#include "oper/cuda/launchers.h"

namespace oper {

struct DeviceLibrary {
  LookupLauncher* lookup = nullptr;
  TranslateLauncher* translate = nullptr;
  BagLauncher* check_bags = nullptr;
  ReportLauncher* post_report = nullptr;
  WeightLauncher* weight_gradients = nullptr;
  SumLauncher* sum_gradients = nullptr;
  CountLauncher* accesses_by_rank = nullptr;
  WordLauncher* make_words = nullptr;
  SortScratch* sort_scratch = nullptr;
  SortLauncher* sort = nullptr;
  ListedLauncher* list_words = nullptr;
  FoundLauncher* find_united = nullptr;
  CopyLauncher* copy_rows = nullptr;
  RedirectLauncher* redirect = nullptr;
  ForwardLauncher* list_forwarded = nullptr;
  ForwardCounter* count_forwarded = nullptr;
  ParcelLauncher* write_forwarded = nullptr;
  LengthLauncher* list_lengths = nullptr;
  JoinLauncher* join_accesses = nullptr;
  VectorLauncher* move_vectors = nullptr;
  UpdateLauncher* update_rows = nullptr;
  RunUpdateLauncher* update_runs = nullptr;
  LayoutLauncher* lay_out_gradients = nullptr;
  MergeLauncher* merge_gradients = nullptr;
  MarkLauncher* mark_replicas = nullptr;
  UnionLauncher* unite_words = nullptr;
  ListLauncher* list_replicas = nullptr;
  AggregateLauncher* aggregate_rows = nullptr;
  SliceLauncher* sum_slice = nullptr;
  BufferLauncher* sum_buffers = nullptr;
  GatherLauncher* gather_slices = nullptr;
  TouchedLauncher* mark_touched = nullptr;
  HeaderLauncher* write_header = nullptr;
  MessageLauncher* write_message = nullptr;
  NumberLauncher* take_numbers = nullptr;
  AddMessagesLauncher* add_messages = nullptr;
  CreateSegment* create_segment = nullptr;
  AttachSegment* attach_segment = nullptr;
  ReleaseSegment* release_segment = nullptr;
  StreamWait* stream_is_done = nullptr;
  CudaVersions* versions = nullptr;
  Architectures* architectures = nullptr;
  ErrorText* error_text = nullptr;
  CaptureQuestion* is_captured = nullptr;
};

// The launchers; RuntimeError with what to do where no library was loaded.
const DeviceLibrary& device_library();

// What the kernels report of a batch, int64 [2]; null where the host has looked at it.
BatchReport* report_of(const std::optional<at::Tensor>& report);

// Throws ValueError if a tensor is not on the device that the batch's `others` are on.
void check_on(const at::Tensor& tensor, const at::Tensor& others, const char* name);

// Throws ValueError if one of these tensors, with their names, is not on the device of `others`.
using NamedTensor = std::pair<const at::Tensor&, const char*>;
void check_on(std::initializer_list<NamedTensor> tensors, const at::Tensor& others);

// Throws if the work of a stream is captured by a CUDA graph, in which `what` cannot be done.
void check_not_captured(int64_t stream, const char* what);

// Throws where a launcher returned an error; `what` was to be done.
void check_device(int error, const char* what);

}  // namespace oper
