// torch.ops.oper.map_segment, huge_pages and protect: shared memory as a tensor, mapped with room
// to grow in place, in pages of 2 MiB where the kernel gives them, and read-only where it is asked
// for.
//
// The map goes beyond the file's end, which Python's mmap refuses. Pages there become usable when
// the file grows, in every process that has mapped it; touching them earlier is a SIGBUS, so
// oper/runtime/comm/shared_segment.py hands out views of the file alone.

#include <sys/mman.h>
#include <unistd.h>

#include <ATen/ops/from_blob.h>
#include <c10/core/Allocator.h>
#include <torch/library.h>

#include <cerrno>
#include <cstring>

#include "cpu/common/arguments.h"

namespace oper {
namespace {

constexpr size_t kHugePageBytes = size_t{1} << 21;
constexpr int kCollapse = 25;  // MADV_COLLAPSE, of Linux 6.1; older headers do not have it

at::Tensor map_segment(int64_t descriptor, int64_t reserve_bytes) {
  check_size(reserve_bytes, 1, int64_t{1} << 47, "reserve_bytes");
  // A huge page of the file can be mapped as one only where its address is aligned: take more
  // addresses than needed, and unmap what lies before and behind the aligned ones.
  const size_t size =
      (static_cast<size_t>(reserve_bytes) + kHugePageBytes - 1) / kHugePageBytes * kHugePageBytes;
  void* taken = mmap(nullptr, size + kHugePageBytes, PROT_NONE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  OPER_CHECK(taken != MAP_FAILED, "cannot map ", size, " bytes: ", std::strerror(errno));
  char* const first = static_cast<char*>(taken);
  const size_t before = -reinterpret_cast<uintptr_t>(first) % kHugePageBytes;
  if (before > 0) munmap(first, before);
  munmap(first + before + size, kHugePageBytes - before);
  void* base = mmap(first + before, size, PROT_READ | PROT_WRITE,
                    MAP_SHARED | MAP_NORESERVE | MAP_FIXED, static_cast<int>(descriptor), 0);
  if (base == MAP_FAILED) {
    const int error = errno;
    munmap(first + before, size);
    OPER_CHECK(false, "cannot map ", size, " bytes: ", std::strerror(error));
  }
  return at::from_blob(
      base, {reserve_bytes}, [size](void* p) { munmap(p, size); },
      at::TensorOptions().dtype(at::kByte));
}

// Moves memory to huge pages, as far as the kernel has some; returns whether it had enough. No
// other thread or process may write to the memory meanwhile.
bool huge_pages(const at::Tensor& memory) {
  check_contiguous(memory, "memory");
  char* const base = static_cast<char*>(memory.data_ptr());
  const size_t before = -reinterpret_cast<uintptr_t>(base) % kHugePageBytes;
  if (memory.nbytes() < before + kHugePageBytes) return true;
  char* const first = base + before;
  const size_t size = (memory.nbytes() - before) / kHugePageBytes * kHugePageBytes;
  // The kernel collapses only where there is a page to begin with.
  for (size_t at = 0; at < size; at += kHugePageBytes) {
    volatile char* const byte = first + at;
    *byte = *byte;
  }
  return madvise(first, size, kCollapse) == 0;
}

// Whether this process may write to memory, which begins at a page: a write to what it may not
// write to ends the process (SIGSEGV). The memory's other maps are as they were. What torch
// allocated is refused, as others' memory lies on the same pages.
void protect(const at::Tensor& memory, bool writable) {
  check_contiguous(memory, "memory");
  OPER_CHECK_VALUE(memory.storage().data_ptr().get_deleter() !=
                       c10::GetAllocator(c10::DeviceType::CPU)->raw_deleter(),
                   "memory: must be a segment's, and torch allocated it");
  const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  OPER_CHECK_VALUE(
      memory.nbytes() > 0 && reinterpret_cast<uintptr_t>(memory.data_ptr()) % page == 0,
      "memory: must begin at a page, as a segment does");
  const size_t size = (memory.nbytes() + page - 1) / page * page;
  const int mode = writable ? PROT_READ | PROT_WRITE : PROT_READ;
  OPER_CHECK(mprotect(memory.data_ptr(), size, mode) == 0, "cannot protect ", size,
             " bytes: ", std::strerror(errno));
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(oper, m) {
  m.def("map_segment(int descriptor, int reserve_bytes) -> Tensor");
  m.def("huge_pages(Tensor(a!) memory) -> bool");
  m.def("protect(Tensor(a!) memory, bool writable) -> ()");
}

TORCH_LIBRARY_IMPL(oper, CPU, m) {
  m.impl("huge_pages", huge_pages);
  m.impl("protect", protect);
}

// It takes no tensor from which a backend could be told.
TORCH_LIBRARY_IMPL(oper, CompositeExplicitAutograd, m) { m.impl("map_segment", map_segment); }

}  // namespace oper
