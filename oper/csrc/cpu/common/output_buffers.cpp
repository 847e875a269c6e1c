// A fresh tensor of 54 MB costs 23 ms to fill and a kept one 7: malloc hands large blocks back to
// the system each time, and every page of the next one faults in again, zeroed. The outputs of
// training steps have one size, or nearly, so a few blocks that outlive their tensors serve
// all steps. Nothing is set for the rest of the process.
#include "cpu/common/output_buffers.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <sys/mman.h>
#include <torch/library.h>

#ifdef __GLIBC__
#include <malloc.h>
#endif

#include <algorithm>
#include <mutex>
#include <vector>

namespace oper {
namespace {

constexpr size_t kLeastBytes = size_t{1} << 20;  // smaller ones malloc keeps by itself
constexpr size_t kHugePage = size_t{2} << 20;
constexpr size_t kKept = 10;         // free blocks; the oldest beyond them are unmapped
constexpr uint64_t kForgotten = 64;  // blocks taken since a kept one was last used

struct Block {
  void* data;
  size_t bytes;
  uint64_t used;  // when it was last given back
};

class Pool {
 public:
  // The smallest kept block that fits without wasting half of it, or a new one.
  Block take(size_t bytes) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      ++taken_;
      auto best = free_.end();
      for (auto block = free_.begin(); block != free_.end(); ++block)
        if (block->bytes >= bytes && block->bytes / 2 <= bytes &&
            (best == free_.end() || block->bytes < best->bytes))
          best = block;
      if (best != free_.end()) {
        const Block found = *best;
        free_.erase(best);
        return found;
      }
    }
    return map(bytes);
  }

  void give_back(Block block) {
    std::vector<Block> dropped;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      block.used = taken_;
      free_.push_back(block);
      const auto stays = [&](const Block& b) { return taken_ - b.used < kForgotten; };
      auto first = std::find_if(free_.begin(), free_.end(), stays);
      if (free_.end() - first > static_cast<ptrdiff_t>(kKept)) first = free_.end() - kKept;
      dropped.assign(free_.begin(), first);
      free_.erase(free_.begin(), first);
    }
    for (const Block& old : dropped) munmap(old.data, old.bytes);
  }

 private:
  // An eighth is added, as batches differ in size; pages that are not touched cost nothing.
  static Block map(size_t bytes) {
    const size_t size = (bytes + bytes / 8 + kHugePage - 1) / kHugePage * kHugePage;
    void* const data =
        mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    TORCH_CHECK_WITH(OutOfMemoryError, data != MAP_FAILED,
                     "the output of the lookup: no memory for ", bytes, " bytes");
    madvise(data, size, MADV_HUGEPAGE);  // a hint: fewer faults and TLB misses
    return {data, size, 0};
  }

  std::mutex mutex_;
  std::vector<Block> free_;  // by the time they were given back
  uint64_t taken_ = 0;
};

// Never destroyed, as tensors may outlive the library's static objects.
Pool& pool() {
  static Pool* const made = new Pool;
  return *made;
}

}  // namespace

at::Tensor pooled_tensor(int64_t elements, at::ScalarType type) {
  const auto options = at::TensorOptions().dtype(type);
  const size_t bytes = static_cast<size_t>(elements) * c10::elementSize(type);
  if (bytes < kLeastBytes) return at::empty({elements}, options);
  const Block block = pool().take(bytes);
  return at::from_blob(
      block.data, {elements}, [block](void*) { pool().give_back(block); }, options);
}

// Returns free memory of malloc to the system.
void trim_memory() {
#ifdef __GLIBC__  // other libraries return large blocks by themselves
  malloc_trim(0);
#endif
}

TORCH_LIBRARY_FRAGMENT(oper, m) { m.def("trim_memory() -> ()"); }

// It takes no tensor from which a backend could be told.
TORCH_LIBRARY_IMPL(oper, CompositeExplicitAutograd, m) { m.impl("trim_memory", trim_memory); }

}  // namespace oper
