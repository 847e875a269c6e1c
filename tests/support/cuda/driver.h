// The functions of CUDA's driver that the kernels' library calls, for tests: shared device memory
// is a memfd, and its handle is that file's descriptor.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <vector>

using CUdeviceptr = unsigned long long;
using CUmemGenericAllocationHandle = unsigned long long;
enum CUresult {
  CUDA_SUCCESS = 0,
  CUDA_ERROR_INVALID_VALUE = 1,
  CUDA_ERROR_OUT_OF_MEMORY = 2,
  CUDA_ERROR_NOT_INITIALIZED = 3,
};
enum CUmemAllocationHandleType { CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR = 1 };
enum CUmemAllocationType { CU_MEM_ALLOCATION_TYPE_PINNED = 1 };
enum CUmemLocationType { CU_MEM_LOCATION_TYPE_DEVICE = 1 };
enum CUmemAllocationGranularity_flags { CU_MEM_ALLOC_GRANULARITY_RECOMMENDED = 1 };
enum CUmemAccess_flags { CU_MEM_ACCESS_FLAGS_PROT_READWRITE = 3 };
struct CUmemLocation {
  CUmemLocationType type;
  int id;
};
struct CUmemAllocationProp {
  CUmemAllocationType type;
  CUmemAllocationHandleType requestedHandleTypes;
  CUmemLocation location;
};
struct CUmemAccessDesc {
  CUmemLocation location;
  CUmemAccess_flags flags;
};

namespace emulator {

inline CUresult result(bool worked) { return worked ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE; }
inline void* pointer(CUdeviceptr place) { return reinterpret_cast<void*>(place); }

}  // namespace emulator

inline CUresult cuMemGetAllocationGranularity(size_t* bytes, const CUmemAllocationProp*,
                                              CUmemAllocationGranularity_flags) {
  *bytes = size_t{2} << 20;
  return CUDA_SUCCESS;
}

inline CUresult cuMemCreate(CUmemGenericAllocationHandle* memory, size_t bytes,
                            const CUmemAllocationProp*, unsigned long long) {
  const int file = memfd_create("oper-emulated", MFD_CLOEXEC);
  if (file < 0) return CUDA_ERROR_OUT_OF_MEMORY;
  // What a device gives may have anything in it.
  const std::vector<char> anything(size_t{1} << 20, 'Z');
  for (size_t at = 0; at < bytes; at += anything.size())
    if (write(file, anything.data(), std::min(anything.size(), bytes - at)) < 0)
      return CUDA_ERROR_OUT_OF_MEMORY;
  *memory = static_cast<CUmemGenericAllocationHandle>(file);
  return CUDA_SUCCESS;
}

inline CUresult cuMemExportToShareableHandle(void* descriptor, CUmemGenericAllocationHandle memory,
                                             CUmemAllocationHandleType, unsigned long long) {
  const int file = dup(static_cast<int>(memory));
  *static_cast<int*>(descriptor) = file;
  return emulator::result(file >= 0);
}

inline CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle* memory,
                                               void* descriptor, CUmemAllocationHandleType) {
  const int file = dup(static_cast<int>(reinterpret_cast<intptr_t>(descriptor)));
  *memory = static_cast<CUmemGenericAllocationHandle>(file);
  return emulator::result(file >= 0);
}

inline CUresult cuMemRelease(CUmemGenericAllocationHandle memory) {
  return emulator::result(close(static_cast<int>(memory)) == 0);
}

inline CUresult cuMemAddressReserve(CUdeviceptr* place, size_t bytes, size_t, CUdeviceptr,
                                    unsigned long long) {
  void* const found = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  *place = reinterpret_cast<CUdeviceptr>(found);
  return found == MAP_FAILED ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS;
}

// Not to be read before cuMemSetAccess.
inline CUresult cuMemMap(CUdeviceptr place, size_t bytes, size_t, CUmemGenericAllocationHandle file,
                         unsigned long long) {
  return emulator::result(mmap(emulator::pointer(place), bytes, PROT_NONE, MAP_SHARED | MAP_FIXED,
                               static_cast<int>(file), 0) != MAP_FAILED);
}

inline CUresult cuMemSetAccess(CUdeviceptr place, size_t bytes, const CUmemAccessDesc*, size_t) {
  return emulator::result(mprotect(emulator::pointer(place), bytes, PROT_READ | PROT_WRITE) == 0);
}

inline CUresult cuMemUnmap(CUdeviceptr place, size_t bytes) {
  return emulator::result(mmap(emulator::pointer(place), bytes, PROT_NONE,
                               MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) != MAP_FAILED);
}

inline CUresult cuMemAddressFree(CUdeviceptr place, size_t bytes) {
  return emulator::result(munmap(emulator::pointer(place), bytes) == 0);
}
