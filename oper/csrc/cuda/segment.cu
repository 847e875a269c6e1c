// oper_cuda_create_segment, oper_cuda_attach_segment, oper_cuda_release_segment: device memory that
// the ranks of a node share, as oper/runtime/comm/shared_segment.py shares the host's.
//
// A segment is an allocation without a name, handed to others as a descriptor, which each of them
// maps where its own device can read it. The driver frees it when the last process that has it
// mapped or holds a descriptor is gone, however that ended.

#include <unistd.h>

#include "oper/cuda/device.h"
#include "oper/cuda/launchers.h"

namespace oper {
namespace {

constexpr auto kDescriptor = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;

template <typename Function, typename... Arguments>
CUresult call(Function function, Arguments... arguments) {
  return function ? function(arguments...) : CUDA_ERROR_NOT_INITIALIZED;
}

CUmemAllocationProp memory_of(int device) {
  CUmemAllocationProp memory{};
  memory.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  memory.requestedHandleTypes = kDescriptor;
  memory.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  memory.location.id = device;
  return memory;
}

CUresult release(uint64_t pointer, uint64_t bytes, bool mapped) {
  CUresult result = CUDA_SUCCESS;
  if (mapped) result = call(OPER_DRIVER(cuMemUnmap), static_cast<CUdeviceptr>(pointer), bytes);
  if (result) return result;
  return call(OPER_DRIVER(cuMemAddressFree), static_cast<CUdeviceptr>(pointer), bytes);
}

// Maps memory where `device` can read and write it. The map keeps the memory: its handle is given
// up in any case.
CUresult map(int device, CUmemGenericAllocationHandle memory, uint64_t bytes, uint64_t* pointer) {
  CUdeviceptr place = 0;
  CUresult result = call(OPER_DRIVER(cuMemAddressReserve), &place, bytes, 0, 0, 0);
  if (!result) {
    bool mapped = false;
    result = call(OPER_DRIVER(cuMemMap), place, bytes, 0, memory, 0);
    if (!result) {
      mapped = true;
      const CUmemAccessDesc access{memory_of(device).location, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
      result = call(OPER_DRIVER(cuMemSetAccess), place, bytes, &access, 1);
    }
    if (result) release(place, bytes, mapped);
  }
  const CUresult given_up = call(OPER_DRIVER(cuMemRelease), memory);
  *pointer = place;
  return result ? result : given_up;
}

}  // namespace
}  // namespace oper

extern "C" int oper_cuda_create_segment(int device, uint64_t bytes, uint64_t* size,
                                        uint64_t* pointer, int* descriptor) {
  using namespace oper;
  const CUmemAllocationProp properties = memory_of(device);
  size_t unit = 0;
  CUresult result = call(OPER_DRIVER(cuMemGetAllocationGranularity), &unit, &properties,
                         CU_MEM_ALLOC_GRANULARITY_RECOMMENDED);
  if (result) return result;
  *size = (bytes + unit - 1) / unit * unit;
  CUmemGenericAllocationHandle memory = 0;
  result = call(OPER_DRIVER(cuMemCreate), &memory, *size, &properties, 0);
  if (result) return result;
  result = call(OPER_DRIVER(cuMemExportToShareableHandle), descriptor, memory, kDescriptor, 0);
  if (result) {
    call(OPER_DRIVER(cuMemRelease), memory);
    return result;
  }
  result = map(device, memory, *size, pointer);
  if (result) close(*descriptor);
  return result;
}

extern "C" int oper_cuda_attach_segment(int device, int descriptor, uint64_t size,
                                        uint64_t* pointer) {
  using namespace oper;
  CUmemGenericAllocationHandle memory = 0;
  void* const handle = reinterpret_cast<void*>(static_cast<intptr_t>(descriptor));
  const CUresult result =
      call(OPER_DRIVER(cuMemImportFromShareableHandle), &memory, handle, kDescriptor);
  return result ? result : map(device, memory, size, pointer);
}

extern "C" int oper_cuda_release_segment(int device, uint64_t pointer, uint64_t size) {
  int before = 0;
  cudaError_t error = cudaGetDevice(&before);
  if (!error) error = cudaSetDevice(device);
  if (error) return error;
  error = cudaDeviceSynchronize();
  if (!error) error = static_cast<cudaError_t>(oper::release(pointer, size, true));
  cudaSetDevice(before);
  return error;
}
