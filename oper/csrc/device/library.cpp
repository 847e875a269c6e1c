// torch.ops.oper.load_device_library and describe_device_library: finds the launchers of device
// kernels, and what these were built for.

#include "device/library.h"

#include <torch/library.h>

#include <string>
#include <tuple>

#include "cpu/common/errors.h"
#include "device/open_library.h"

namespace oper {
namespace {

DeviceLibrary loaded;

// The library stays loaded; a second one takes its place.
void load_device_library(const std::string& path) {
  const OpenLibrary library(path, "the device kernels", "oper_cuda_interface", kDeviceInterface);
  DeviceLibrary found;
  library.find("oper_cuda_lookup", found.lookup);
  library.find("oper_cuda_translate", found.translate);
  library.find("oper_cuda_check_bags", found.check_bags);
  library.find("oper_cuda_post_report", found.post_report);
  library.find("oper_cuda_weight_gradients", found.weight_gradients);
  library.find("oper_cuda_sum_gradients", found.sum_gradients);
  library.find("oper_cuda_accesses_by_rank", found.accesses_by_rank);
  library.find("oper_cuda_make_words", found.make_words);
  library.find("oper_cuda_sort_scratch", found.sort_scratch);
  library.find("oper_cuda_sort", found.sort);
  library.find("oper_cuda_list_words", found.list_words);
  library.find("oper_cuda_find_united", found.find_united);
  library.find("oper_cuda_copy_rows", found.copy_rows);
  library.find("oper_cuda_redirect", found.redirect);
  library.find("oper_cuda_list_forwarded", found.list_forwarded);
  library.find("oper_cuda_count_forwarded", found.count_forwarded);
  library.find("oper_cuda_write_forwarded", found.write_forwarded);
  library.find("oper_cuda_list_lengths", found.list_lengths);
  library.find("oper_cuda_join_accesses", found.join_accesses);
  library.find("oper_cuda_move_vectors", found.move_vectors);
  library.find("oper_cuda_update_rows", found.update_rows);
  library.find("oper_cuda_update_runs", found.update_runs);
  library.find("oper_cuda_lay_out_gradients", found.lay_out_gradients);
  library.find("oper_cuda_merge_gradients", found.merge_gradients);
  library.find("oper_cuda_mark_replicas", found.mark_replicas);
  library.find("oper_cuda_unite_words", found.unite_words);
  library.find("oper_cuda_list_replicas", found.list_replicas);
  library.find("oper_cuda_aggregate_rows", found.aggregate_rows);
  library.find("oper_cuda_sum_slice", found.sum_slice);
  library.find("oper_cuda_sum_buffers", found.sum_buffers);
  library.find("oper_cuda_gather_slices", found.gather_slices);
  library.find("oper_cuda_mark_touched", found.mark_touched);
  library.find("oper_cuda_write_header", found.write_header);
  library.find("oper_cuda_write_message", found.write_message);
  library.find("oper_cuda_take_numbers", found.take_numbers);
  library.find("oper_cuda_add_messages", found.add_messages);
  library.find("oper_cuda_create_segment", found.create_segment);
  library.find("oper_cuda_attach_segment", found.attach_segment);
  library.find("oper_cuda_release_segment", found.release_segment);
  library.find("oper_cuda_stream", found.stream_is_done);
  library.find("oper_cuda_is_captured", found.is_captured);
  library.find("oper_cuda_versions", found.versions);
  library.find("oper_cuda_architectures", found.architectures);
  library.find("oper_cuda_error", found.error_text);
  loaded = found;
}

// The driver's version, the runtime's, and the architectures, as the launchers give them.
std::tuple<int64_t, int64_t, std::string> describe_device_library() {
  int driver = 0, runtime = 0;
  device_library().versions(&driver, &runtime);
  return {driver, runtime, device_library().architectures()};
}

}  // namespace

const DeviceLibrary& device_library() {
  OPER_CHECK(loaded.lookup, "the device kernels are not loaded");
  return loaded;
}

BatchReport* report_of(const std::optional<at::Tensor>& report) {
  if (!report) return nullptr;
  OPER_CHECK_VALUE(
      report->scalar_type() == at::kLong && report->numel() == 2 && report->is_contiguous(),
      "report: expected two contiguous int64, got ", report->scalar_type(), " ", report->sizes());
  return static_cast<BatchReport*>(report->mutable_data_ptr());
}

void check_on(const at::Tensor& tensor, const at::Tensor& others, const char* name) {
  OPER_CHECK_VALUE(tensor.device() == others.device(), name, ": on ", tensor.device(),
                   ", and the batch is on ", others.device());
}

void check_on(std::initializer_list<NamedTensor> tensors, const at::Tensor& others) {
  for (const auto& [tensor, name] : tensors) check_on(tensor, others, name);
}

void check_not_captured(int64_t stream, const char* what) {
  int captured = 0;
  check_device(device_library().is_captured(reinterpret_cast<void*>(stream), &captured),
               "the stream's state is unknown");
  OPER_CHECK(!captured, "a CUDA graph is captured, in which ", what);
}

void check_device(int error, const char* what) {
  OPER_CHECK(error == 0, what, ": CUDA says ", loaded.error_text(error), " (", error, ")");
}

}  // namespace oper

TORCH_LIBRARY_FRAGMENT(oper, m) {
  m.def("load_device_library(str path) -> ()");
  m.def("describe_device_library() -> (int driver, int runtime, str architectures)");
}

TORCH_LIBRARY_IMPL(oper, CompositeExplicitAutograd, m) {
  m.impl("load_device_library", oper::load_device_library);
  m.impl("describe_device_library", oper::describe_device_library);
}
