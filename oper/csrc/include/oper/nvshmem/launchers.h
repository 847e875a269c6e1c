// What the library of NVSHMEM's kernels exports: the launchers of csrc/nvshmem/*.cu, and what the
// host asks of NVSHMEM. The extension finds them by name where a topology's transport is nvshmem,
// and the tests' emulator has the same.
#pragma once

#include <cstdint>

#include "oper/cuda/launchers.h"

namespace oper {

// Where rows lie that may have no pointer here: a rank's `arenas` begin at 0 then, and its rows are
// asked for by addresses in this rank's symmetric memory, which are as far in as its own.
struct GetArguments : LookupArguments {
  const int64_t* symmetric;  // [ranks + 1] where each rank's arena of the width begins
  // Room for rows on their way, symmetric: `chunk` rows for each group of threads of the launch.
  uint8_t* stage;
  int64_t stage_bytes;
  int64_t chunk;
};

// Distinct rows of other ranks that are brought into a buffer, and the addresses of the accesses
// that read them. Rows and accesses are those that sort_accesses found, by position.
struct FetchArguments {
  const int32_t* positions;
  const int32_t* run_start;
  const int64_t* slots;      // [runs]
  const int64_t* run_count;  // [buckets · (ranks + 1) + 1] runs before each group
  int64_t bucket;
  const int64_t* row_bytes;  // [buckets]
  const int64_t* arenas;     // [ranks + 1] of the bucket's width; 0: the rank has no pointer here
  const int64_t* symmetric;  // [ranks + 1]
  int64_t ranks;
  int64_t rank;
  uint8_t* buffer;     // symmetric or registered; the buckets' rows one after another
  int64_t* addresses;  // of all accesses
  const BatchReport* report;
};

// Bytes of another rank's symmetric memory that are brought here: where they lie there, from the
// source on, and come to here, in the buffer.
struct RemotePiece {
  int64_t rank;
  int64_t from;
  int64_t to;
  int64_t bytes;
};

struct PiecesArguments {
  const RemotePiece* pieces;  // [size], on the device
  int64_t size;
  const uint8_t* source;  // where the memory of any rank would lie in this rank's
  uint8_t* buffer;        // symmetric or registered
};

// Starts the lookup of `features` features; cuts the tiles and chooses the chunk.
using GetLauncher = int(GetArguments*, int64_t row_type, int64_t features, void* stream);
using FetchLauncher = int(const FetchArguments*, void* stream);
using PiecesLauncher = int(const PiecesArguments*, void* stream);

// What names a group of ranks that start together: one of them makes it, and all are told.
constexpr int64_t kUniqueIdBytes = 128;
using MakeUniqueId = int(uint8_t* id);
// Starts NVSHMEM on the current device, as `rank` of `ranks`; all of them together, once a process.
// *pe of *pes is who it takes this process for.
using StartNvshmem = int(const uint8_t* id, int rank, int ranks, int* pe, int* pes);

// The versions of NVSHMEM that the kernels were built with, and that runs: 30405 is 3.4.5.
using NvshmemVersions = void(int64_t* built, int64_t* found);

// Memory of so many bytes, the same on all ranks, which allocate and free together, in one order.
using AllocateSymmetric = int(uint64_t bytes, uint64_t* pointer);
using FreeSymmetric = void(uint64_t pointer);
// Where another rank's memory lies here that is as far in as `pointer`; 0 where it is not mapped.
using MappedSymmetric = uint64_t(uint64_t pointer, int rank);

// Lets rows be brought into other memory of the device, until it is given back.
using RegisterBuffer = int(uint64_t pointer, uint64_t bytes);
using UnregisterBuffer = int(uint64_t pointer);

constexpr int64_t kNvshmemInterface =
    (int64_t{5} << 32) + sizeof(GetArguments) + sizeof(FetchArguments) + sizeof(PiecesArguments);

}  // namespace oper
