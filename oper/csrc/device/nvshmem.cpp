// torch.ops.oper.load_nvshmem_library and what the host asks of NVSHMEM: to start, and for memory
// that all ranks have at one place; fetch_rows, which brings distinct rows of other ranks; and
// get_pieces, which brings whatever they have there.

#include "device/nvshmem.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/DeviceGuard.h>
#include <dlfcn.h>
#include <torch/library.h>

#include <algorithm>
#include <string>

#include "cpu/common/arguments.h"
#include "cpu/step/batch_arguments.h"
#include "device/library.h"
#include "device/open_library.h"
#include "schemas.h"

namespace oper {
namespace {

NvshmemLibrary loaded_nvshmem;

// `host_library` is NVSHMEM's own, which the kernels' library needs; "" where it needs none. Both
// stay loaded.
void load_nvshmem_library(const std::string& path, const std::string& host_library) {
  OPER_CHECK(host_library.empty() || dlopen(host_library.c_str(), RTLD_NOW | RTLD_GLOBAL),
             "cannot load NVSHMEM: ", dlerror());
  const OpenLibrary library(path, "NVSHMEM's kernels", "oper_nvshmem_interface", kNvshmemInterface);
  NvshmemLibrary found;
  library.find("oper_nvshmem_lookup", found.lookup);
  library.find("oper_nvshmem_fetch_rows", found.fetch_rows);
  library.find("oper_nvshmem_get_pieces", found.get_pieces);
  library.find("oper_nvshmem_unique_id", found.unique_id);
  library.find("oper_nvshmem_start", found.start);
  library.find("oper_nvshmem_versions", found.versions);
  library.find("oper_nvshmem_allocate", found.allocate);
  library.find("oper_nvshmem_free", found.free);
  library.find("oper_nvshmem_mapped", found.mapped);
  library.find("oper_nvshmem_register", found.register_buffer);
  library.find("oper_nvshmem_unregister", found.unregister_buffer);
  loaded_nvshmem = found;
}

void check_nvshmem(int error, const char* what) {
  OPER_CHECK(error == 0, what, ": NVSHMEM says ", error,
             " (its own output says why; NVSHMEM_DEBUG=INFO makes it say more)");
}

at::Tensor nvshmem_unique_id() {
  at::Tensor id = at::empty({kUniqueIdBytes}, at::kByte);
  check_nvshmem(nvshmem_library().unique_id(id.mutable_data_ptr<uint8_t>()),
                "no group of ranks could be named");
  return id;
}

// To be called on all ranks together, once a process; devices are those that they go on with.
// Who NVSHMEM takes this process for, and how many there are.
std::tuple<int64_t, int64_t> start_nvshmem(const at::Tensor& id, int64_t rank, int64_t ranks,
                                           c10::Device device) {
  const c10::DeviceGuard guard(device);
  const uint8_t* const bytes = elements<uint8_t>(id, kUniqueIdBytes, "id");
  int pe = -1, pes = 0;
  check_nvshmem(
      nvshmem_library().start(bytes, static_cast<int>(rank), static_cast<int>(ranks), &pe, &pes),
      "it could not be started");
  return {pe, pes};
}

// The versions that the kernels were built with, and that runs: 30405 is 3.4.5.
std::tuple<int64_t, int64_t> nvshmem_versions() {
  int64_t built = 0, found = 0;
  nvshmem_library().versions(&built, &found);
  return {built, found};
}

// Memory that NVSHMEM has, as a tensor that does not own it; empty where there is none.
at::Tensor bytes_at(uint64_t pointer, int64_t bytes, c10::Device device) {
  const auto options = at::TensorOptions().dtype(at::kByte).device(device);
  if (!pointer) return at::empty({0}, options);
  return at::from_blob(reinterpret_cast<void*>(pointer), {bytes}, [](void*) {}, options, device);
}

// Memory of so many bytes, the same on all ranks, which call this together. It is not zeroed, and
// stays until free_symmetric.
at::Tensor allocate_symmetric(int64_t bytes, c10::Device device) {
  OPER_CHECK_VALUE(bytes > 0, "bytes: ", bytes, " is not positive");
  const c10::DeviceGuard guard(device);
  uint64_t pointer = 0;
  check_nvshmem(nvshmem_library().allocate(static_cast<uint64_t>(bytes), &pointer),
                "no symmetric memory could be allocated");
  return bytes_at(pointer, bytes, device);
}

// To be called on all ranks together, and with the memory that each of them allocated in that turn.
void free_symmetric(const at::Tensor& memory) {
  const c10::DeviceGuard guard(memory.device());
  nvshmem_library().free(reinterpret_cast<uint64_t>(memory.mutable_data_ptr()));
}

// Another rank's memory that was allocated with this; empty where it is not mapped here.
at::Tensor mapped_symmetric(const at::Tensor& memory, int64_t rank) {
  const c10::DeviceGuard guard(memory.device());
  const uint64_t found = nvshmem_library().mapped(
      reinterpret_cast<uint64_t>(memory.mutable_data_ptr()), static_cast<int>(rank));
  return bytes_at(found, memory.numel(), memory.device());
}

// Lets rows be brought into a tensor of the device, until unregister_buffer.
void register_buffer(const at::Tensor& buffer) {
  const c10::DeviceGuard guard(buffer.device());
  check_nvshmem(
      nvshmem_library().register_buffer(reinterpret_cast<uint64_t>(buffer.mutable_data_ptr()),
                                        static_cast<uint64_t>(buffer.nbytes())),
      "a buffer could not be registered");
}

void unregister_buffer(const at::Tensor& buffer) {
  const c10::DeviceGuard guard(buffer.device());
  check_nvshmem(
      nvshmem_library().unregister_buffer(reinterpret_cast<uint64_t>(buffer.mutable_data_ptr())),
      "a buffer could not be given back");
}

// Brings the distinct rows of other ranks into `buffer`, and lets the accesses that read them read
// them there, as rank number `ranks`. Rows are those that sort_accesses found by position; bucket
// b's are of width widths[b], of row_bytes[b] bytes (on the host and on the device).
void fetch_rows(const at::Tensor& addresses, const at::Tensor& positions,
                const at::Tensor& run_start, const at::Tensor& slots, const at::Tensor& run_count,
                const at::Tensor& bases, const at::Tensor& symmetric, at::IntArrayRef widths,
                at::IntArrayRef row_bytes, const at::Tensor& row_bytes_there,
                const at::Tensor& buffer, int64_t rank, int64_t stream,
                const std::optional<at::Tensor>& report) {
  const c10::DeviceGuard guard(addresses.device());
  check_bases(bases, rank);
  const int64_t ranks = bases.size(1) - 1, buckets = static_cast<int64_t>(widths.size());
  OPER_CHECK_VALUE(symmetric.sizes() == bases.sizes(), "symmetric: expected one per base, ",
                   bases.sizes(), ", got ", symmetric.sizes());
  OPER_CHECK_VALUE(row_bytes.size() == widths.size(), "row_bytes: expected ", widths.size(),
                   ", one per bucket, got ", row_bytes.size());
  for (const at::Tensor* given :
       {&positions, &run_start, &slots, &run_count, &bases, &symmetric, &row_bytes_there, &buffer})
    check_on(*given, addresses, "what is fetched by");
  const int64_t most =
      row_bytes.empty() ? 0 : *std::max_element(row_bytes.begin(), row_bytes.end());
  OPER_CHECK_VALUE(buffer.numel() >= (addresses.numel() + buckets) * most, "buffer: of ",
                   buffer.numel(), " bytes, and it needs room for all accesses");
  FetchArguments a{};
  a.positions = elements<int32_t>(positions, "positions");
  a.run_start = elements<int32_t>(run_start, "run_start");
  a.slots = elements<int64_t>(slots, "slots");
  a.run_count = elements<int64_t>(run_count, buckets * (ranks + 1) + 1, "run_count");
  a.row_bytes = elements<int64_t>(row_bytes_there, buckets, "row_bytes_there");
  a.ranks = ranks;
  a.rank = rank;
  a.buffer = buffer.mutable_data_ptr<uint8_t>();
  elements<int64_t>(addresses, "addresses");
  a.addresses = addresses.mutable_data_ptr<int64_t>();
  if (report) check_on(*report, addresses, "report");
  a.report = report_of(report);
  const auto* const arenas = elements<int64_t>(bases, "bases");
  const auto* const there = elements<int64_t>(symmetric, "symmetric");
  for (int64_t b = 0; b < buckets; ++b) {
    OPER_CHECK_VALUE(widths[b] >= 0 && widths[b] < bases.size(0), "widths: ", widths[b]);
    a.bucket = b;
    a.arenas = arenas + widths[b] * (ranks + 1);
    a.symmetric = there + widths[b] * (ranks + 1);
    check_device(nvshmem_library().fetch_rows(&a, reinterpret_cast<void*>(stream)),
                 "the fetch of rows could not be started");
  }
}

// Brings pieces of what other ranks have where `source` is here, in symmetric memory, to `buffer`:
// int64 [pieces, 4], each with its rank, where it begins there and comes to here, and its bytes.
void get_pieces(const at::Tensor& pieces, const at::Tensor& source, const at::Tensor& buffer,
                int64_t stream) {
  const c10::DeviceGuard guard(buffer.device());
  for (const at::Tensor* given : {&pieces, &source}) check_on(*given, buffer, "what is fetched by");
  OPER_CHECK_VALUE(pieces.dim() == 2, "pieces: expected [pieces, 4], got ", pieces.sizes());
  PiecesArguments a{};
  a.pieces = structs<RemotePiece>(pieces, "pieces");
  a.size = pieces.size(0);
  a.source = elements<uint8_t>(source, "source");
  elements<uint8_t>(buffer, "buffer");
  a.buffer = buffer.mutable_data_ptr<uint8_t>();
  check_device(nvshmem_library().get_pieces(&a, reinterpret_cast<void*>(stream)),
               "the fetch of pieces could not be started");
}

}  // namespace

const NvshmemLibrary& nvshmem_library() {
  OPER_CHECK(loaded_nvshmem.lookup, "the kernels for NVSHMEM are not loaded");
  return loaded_nvshmem;
}

}  // namespace oper

TORCH_LIBRARY_FRAGMENT(oper, m) {
  m.def("load_nvshmem_library(str path, str host_library) -> ()");
  m.def("nvshmem_unique_id() -> Tensor");
  m.def("start_nvshmem(Tensor id, int rank, int ranks, Device device) -> (int rank, int ranks)");
  m.def("nvshmem_versions() -> (int built, int found)");
  m.def("allocate_symmetric(int bytes, Device device) -> Tensor");
  m.def("free_symmetric(Tensor memory) -> ()");
  m.def("mapped_symmetric(Tensor memory, int rank) -> Tensor");
  m.def("register_buffer(Tensor buffer) -> ()");
  m.def("unregister_buffer(Tensor buffer) -> ()");
  m.def(oper::schemas::kFetchRows);
  m.def(oper::schemas::kGetPieces);
}

TORCH_LIBRARY_IMPL(oper, CompositeExplicitAutograd, m) {
  m.impl("load_nvshmem_library", oper::load_nvshmem_library);
  m.impl("nvshmem_unique_id", oper::nvshmem_unique_id);
  m.impl("start_nvshmem", oper::start_nvshmem);
  m.impl("nvshmem_versions", oper::nvshmem_versions);
  m.impl("allocate_symmetric", oper::allocate_symmetric);
  m.impl("free_symmetric", oper::free_symmetric);
  m.impl("mapped_symmetric", oper::mapped_symmetric);
  m.impl("register_buffer", oper::register_buffer);
  m.impl("unregister_buffer", oper::unregister_buffer);
}
TORCH_LIBRARY_IMPL(oper, CUDA, m) {
  m.impl("fetch_rows", oper::fetch_rows);
  m.impl("get_pieces", oper::get_pieces);
}

// For tests, of memory that the emulator takes for a device's.
TORCH_LIBRARY_FRAGMENT(oper_emulated, m) {
  m.def(oper::schemas::kFetchRows);
  m.def(oper::schemas::kGetPieces);
}
TORCH_LIBRARY_IMPL(oper_emulated, CPU, m) {
  m.impl("fetch_rows", oper::fetch_rows);
  m.impl("get_pieces", oper::get_pieces);
}
