// What the host asks of NVSHMEM: to start, and for memory that all ranks have at one place.

#include <cstring>

#include "oper/nvshmem/calls.h"
#include "oper/nvshmem/launchers.h"

static_assert(sizeof(nvshmemx_uniqueid_t) == oper::kUniqueIdBytes);

extern "C" int64_t oper_nvshmem_interface() { return oper::kNvshmemInterface; }

extern "C" int oper_nvshmem_unique_id(uint8_t* id) {
  nvshmemx_uniqueid_t made = NVSHMEMX_UNIQUEID_INITIALIZER;
  const int error = nvshmemx_get_uniqueid(&made);
  std::memcpy(id, &made, sizeof made);
  return error;
}

// NVSHMEM that runs already, started by another library of this process, stays as it is: who it
// takes this process for is told.
extern "C" int oper_nvshmem_start(const uint8_t* id, int rank, int ranks, int* pe, int* pes) {
  cudaFree(nullptr);  // makes the device's context, without which NVSHMEM would start in part
  nvshmemx_uniqueid_t given;
  std::memcpy(&given, id, sizeof given);
  nvshmemx_init_attr_t attributes = NVSHMEMX_INIT_ATTR_INITIALIZER;
  const int error = nvshmemx_set_attr_uniqueid_args(rank, ranks, &given, &attributes);
  if (error) return error;
  if (const int failed = nvshmemx_init_attr(NVSHMEMX_INIT_WITH_UNIQUEID, &attributes))
    return failed;
  *pe = nvshmem_my_pe();
  *pes = nvshmem_n_pes();
  return 0;
}

extern "C" void oper_nvshmem_versions(int64_t* built, int64_t* found) {
  const auto number = [](int64_t major, int64_t minor, int64_t patch) {
    return major * 10000 + minor * 100 + patch;
  };
  *built = number(NVSHMEM_VENDOR_MAJOR_VERSION, NVSHMEM_VENDOR_MINOR_VERSION,
                  NVSHMEM_VENDOR_PATCH_VERSION);
  int major = 0, minor = 0, patch = 0;
  nvshmemx_vendor_get_version_info(&major, &minor, &patch);
  *found = number(major, minor, patch);
}

extern "C" int oper_nvshmem_allocate(uint64_t bytes, uint64_t* pointer) {
  *pointer = reinterpret_cast<uint64_t>(nvshmem_malloc(bytes));
  return *pointer == 0;
}

extern "C" void oper_nvshmem_free(uint64_t pointer) {
  nvshmem_free(reinterpret_cast<void*>(pointer));
}

extern "C" uint64_t oper_nvshmem_mapped(uint64_t pointer, int rank) {
  return reinterpret_cast<uint64_t>(nvshmem_ptr(reinterpret_cast<void*>(pointer), rank));
}

extern "C" int oper_nvshmem_register(uint64_t pointer, uint64_t bytes) {
  return nvshmemx_buffer_register(reinterpret_cast<void*>(pointer), bytes);
}

extern "C" int oper_nvshmem_unregister(uint64_t pointer) {
  return nvshmemx_buffer_unregister(reinterpret_cast<void*>(pointer));
}
