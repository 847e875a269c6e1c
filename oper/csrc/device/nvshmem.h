// The library of NVSHMEM's kernels, oper/_nvshmem.so: loaded only where a topology's transport is
// nvshmem.
#pragma once

#include "oper/nvshmem/launchers.h"

namespace oper {

struct NvshmemLibrary {
  GetLauncher* lookup = nullptr;
  FetchLauncher* fetch_rows = nullptr;
  PiecesLauncher* get_pieces = nullptr;
  MakeUniqueId* unique_id = nullptr;
  StartNvshmem* start = nullptr;
  NvshmemVersions* versions = nullptr;
  AllocateSymmetric* allocate = nullptr;
  FreeSymmetric* free = nullptr;
  MappedSymmetric* mapped = nullptr;
  RegisterBuffer* register_buffer = nullptr;
  UnregisterBuffer* unregister_buffer = nullptr;
};

// RuntimeError where no library was loaded.
const NvshmemLibrary& nvshmem_library();

}  // namespace oper
