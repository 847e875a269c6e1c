// torch.ops.oper.load_device_library and describe_device_library: finds the launchers of device
// kernels, and what these were built for.

#include "device/library.h"

#include <dlfcn.h>
#include <elf.h>
#include <torch/library.h>

#include <filesystem>
#include <fstream>
#include <string>
#include <tuple>

namespace oper {
namespace {

DeviceLibrary loaded;

template <typename Launcher>
void find(void* library, const char* name, Launcher*& launcher) {
  launcher = reinterpret_cast<Launcher*>(dlsym(library, name));
  TORCH_CHECK(launcher, "the library of device kernels has no ", name,
              ": it is of another version; build it again");
}

// A library that was copied in part ends the process where it is opened. Linkers write the table of
// sections last.
void check_whole(const std::string& path) {
  std::error_code failed;
  const uintmax_t size = std::filesystem::file_size(path, failed);
  Elf64_Ehdr header = {};
  std::ifstream file(path, std::ios::binary);
  if (failed || !file) return;  // which the loader says better
  file.read(reinterpret_cast<char*>(&header), sizeof(header));
  const uintmax_t needed = header.e_shoff + uintmax_t{header.e_shnum} * header.e_shentsize;
  TORCH_CHECK(file && needed <= size, path, " is cut off: it has ", size, " bytes; copy it again");
}

// The library stays loaded; a second one takes its place.
void load_device_library(const std::string& path) {
  check_whole(path);
  void* const library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  TORCH_CHECK(library, "cannot load the device kernels: ", dlerror());
  InterfaceNumber* interface = nullptr;
  find(library, "oper_cuda_interface", interface);
  TORCH_CHECK(interface() == kDeviceInterface, path, " is of another version; build it again");
  DeviceLibrary found;
  find(library, "oper_cuda_lookup", found.lookup);
  find(library, "oper_cuda_translate", found.translate);
  find(library, "oper_cuda_check_bags", found.check_bags);
  find(library, "oper_cuda_weight_gradients", found.weight_gradients);
  find(library, "oper_cuda_sum_gradients", found.sum_gradients);
  find(library, "oper_cuda_accesses_by_rank", found.accesses_by_rank);
  find(library, "oper_cuda_make_words", found.make_words);
  find(library, "oper_cuda_sort_scratch", found.sort_scratch);
  find(library, "oper_cuda_sort", found.sort);
  find(library, "oper_cuda_update_rows", found.update_rows);
  find(library, "oper_cuda_update_runs", found.update_runs);
  find(library, "oper_cuda_lay_out_gradients", found.lay_out_gradients);
  find(library, "oper_cuda_merge_gradients", found.merge_gradients);
  find(library, "oper_cuda_mark_replicas", found.mark_replicas);
  find(library, "oper_cuda_unite_words", found.unite_words);
  find(library, "oper_cuda_list_replicas", found.list_replicas);
  find(library, "oper_cuda_aggregate_rows", found.aggregate_rows);
  find(library, "oper_cuda_sum_slice", found.sum_slice);
  find(library, "oper_cuda_gather_slices", found.gather_slices);
  find(library, "oper_cuda_create_segment", found.create_segment);
  find(library, "oper_cuda_attach_segment", found.attach_segment);
  find(library, "oper_cuda_release_segment", found.release_segment);
  find(library, "oper_cuda_stream", found.stream_is_done);
  find(library, "oper_cuda_versions", found.versions);
  find(library, "oper_cuda_architectures", found.architectures);
  find(library, "oper_cuda_error", found.error_text);
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
  TORCH_CHECK(loaded.lookup, "the device kernels are not loaded");
  return loaded;
}

BatchReport* report_of(const std::optional<at::Tensor>& report) {
  if (!report) return nullptr;
  TORCH_CHECK_VALUE(
      report->scalar_type() == at::kLong && report->numel() == 2 && report->is_contiguous(),
      "report: two int64 were needed");
  return static_cast<BatchReport*>(report->mutable_data_ptr());
}

void check_on(const at::Tensor& tensor, const at::Tensor& others, const char* name) {
  TORCH_CHECK_VALUE(tensor.device() == others.device(), name, ": on ", tensor.device(),
                    ", and the batch is on ", others.device());
}

void check_device(int error, const char* what) {
  TORCH_CHECK(error == 0, what, ": CUDA says ", loaded.error_text(error), " (", error, ")");
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
