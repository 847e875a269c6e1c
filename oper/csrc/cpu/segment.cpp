// torch.ops.oper.map_segment: shared memory as a tensor, mapped with room to grow in place.
//
// The map goes beyond the file's end, which Python's mmap refuses. Pages there become usable when
// the file grows, in every process that has mapped it; touching them earlier is a SIGBUS, so
// oper/runtime/segment.py hands out views of the file alone.

#include <sys/mman.h>

#include <ATen/ops/from_blob.h>
#include <torch/library.h>

#include <cerrno>
#include <cstring>

namespace oper {
namespace {

at::Tensor map_segment(int64_t descriptor, int64_t reserve_bytes) {
  TORCH_CHECK_VALUE(reserve_bytes > 0, "reserve_bytes: ", reserve_bytes, " is not positive");
  const auto size = static_cast<size_t>(reserve_bytes);
  void* base = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE,
                    static_cast<int>(descriptor), 0);
  TORCH_CHECK(base != MAP_FAILED, "cannot map ", size, " bytes: ", std::strerror(errno));
  return at::from_blob(base, {reserve_bytes}, [size](void* p) { munmap(p, size); },
                       at::TensorOptions().dtype(at::kByte));
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(oper, m) {
  m.def("map_segment(int descriptor, int reserve_bytes) -> Tensor");
}

// It takes no tensor from which a backend could be told.
TORCH_LIBRARY_IMPL(oper, CompositeExplicitAutograd, m) { m.impl("map_segment", map_segment); }

}  // namespace oper
