// What kernels ask of a device, under one name in CUDA and in the tests' emulator of it: launches,
// loads of rows, stores of results. All that is written in assembler is here.
//
// Kernels are compiled twice: by nvcc for devices, and as plain C++ for the emulator, whose header
// then stands for CUDA's (tests/support/cuda/emulator.h).
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__CUDACC__)
#include <cuda.h>
#include <cuda_runtime.h>
#else
#include "emulator.h"
#endif

namespace oper {

constexpr int kWarpThreads = 32;

struct Launch {
  dim3 blocks;
  unsigned threads;
  cudaStream_t stream;
};

// Starts a kernel; cudaSuccess, or why it did not start.
template <typename... Parameters, typename... Arguments>
cudaError_t launch(const Launch& how, void (*kernel)(Parameters...),
                   const Arguments&... arguments) {
#if defined(__CUDACC__)
  kernel<<<how.blocks, how.threads, 0, how.stream>>>(arguments...);
  return cudaGetLastError();
#else
  return emulator::run(how.blocks, how.threads, [&] { kernel(arguments...); });
#endif
}

// A thread for each of one thing or more.
inline Launch a_thread_each(int64_t things, void* stream) {
  constexpr int64_t kThreads = 256;
  return {dim3(static_cast<unsigned>((things + kThreads - 1) / kThreads)), kThreads,
          static_cast<cudaStream_t>(stream)};
}

// Of the current device; 1 where that cannot be told.
inline int64_t multiprocessors() {
  int device = 0, count = 0;
  if (cudaGetDevice(&device) ||
      cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device))
    return 1;
  return count;
}

// Blocks of a kernel that the current device holds at once, by the registers that the kernel has;
// 1 where that cannot be told.
template <typename... Parameters>
int64_t blocks_at_once(void (*kernel)(Parameters...), unsigned threads) {
  int of_one = 0;
  if (cudaOccupancyMaxActiveBlocksPerMultiprocessor(&of_one, kernel, static_cast<int>(threads), 0))
    return 1;
  return of_one > 0 ? of_one * multiprocessors() : 1;
}

// A function of the driver by its name, null where there is no driver: so that the library loads
// there too.
#if defined(__CUDACC__)
template <typename Function>
Function driver_function(const char* name) {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult outcome;
  constexpr unsigned kVersion = 12000;  // of CUDA, whose arguments they take
  const cudaError_t error =
      cudaGetDriverEntryPointByVersion(name, &found, kVersion, cudaEnableDefault, &outcome);
  return error ? nullptr : reinterpret_cast<Function>(found);
}
#define OPER_DRIVER(name) (::oper::driver_function<decltype(&name)>(#name))
#else
#define OPER_DRIVER(name) (&name)
#endif

// kBytes of a row, 16, 8, 4, 2 or 1, as words; the place is a multiple of kBytes.
template <int kBytes>
struct Piece {
  static constexpr int kWords = kBytes < 4 ? 1 : kBytes / 4;
  uint32_t word[kWords];
};

#if !defined(__CUDACC__)
// All three loads below, in the emulator.
template <int kBytes>
Piece<kBytes> emulated_load(const void* place) {
  Piece<kBytes> piece;
  emulator::check_aligned(place, kBytes);
  piece.word[0] = 0;
  std::memcpy(piece.word, place, kBytes);
  return piece;
}
#endif

// A piece of a row, which is read past the first cache: other rows come there before it is read
// again.
template <int kBytes>
__device__ __forceinline__ Piece<kBytes> load_row(const uint8_t* place) {
  Piece<kBytes> piece;
#if defined(__CUDA_ARCH__)
  if constexpr (kBytes == 16) {
    asm("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
        : "=r"(piece.word[0]), "=r"(piece.word[1]), "=r"(piece.word[2]), "=r"(piece.word[3])
        : "l"(place));
  } else if constexpr (kBytes == 8) {
    asm("ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];"
        : "=r"(piece.word[0]), "=r"(piece.word[1])
        : "l"(place));
  } else if constexpr (kBytes == 4) {
    asm("ld.global.nc.L1::no_allocate.u32 %0, [%1];" : "=r"(piece.word[0]) : "l"(place));
  } else if constexpr (kBytes == 2) {
    piece.word[0] = __ldg(reinterpret_cast<const unsigned short*>(place));
  } else {
    piece.word[0] = __ldg(place);
  }
#elif !defined(__CUDACC__)
  emulator::check_unchanged(place);
  piece = emulated_load<kBytes>(place);
#endif
  return piece;
}

// A piece of what comes into memory while this kernel runs, from other devices: never from a cache
// that does not hear of it.
template <int kBytes>
__device__ __forceinline__ Piece<kBytes> load_arrived(const uint8_t* place) {
  Piece<kBytes> piece;
#if defined(__CUDA_ARCH__)
  if constexpr (kBytes == 16) {
    asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(piece.word[0]), "=r"(piece.word[1]), "=r"(piece.word[2]),
                   "=r"(piece.word[3])
                 : "l"(place)
                 : "memory");
  } else if constexpr (kBytes == 8) {
    asm volatile("ld.relaxed.sys.global.v2.u32 {%0, %1}, [%2];"
                 : "=r"(piece.word[0]), "=r"(piece.word[1])
                 : "l"(place)
                 : "memory");
  } else if constexpr (kBytes == 4) {
    asm volatile("ld.relaxed.sys.global.u32 %0, [%1];"
                 : "=r"(piece.word[0])
                 : "l"(place)
                 : "memory");
  } else if constexpr (kBytes == 2) {
    uint16_t half;
    asm volatile("ld.relaxed.sys.global.u16 %0, [%1];" : "=h"(half) : "l"(place) : "memory");
    piece.word[0] = half;
  } else {
    asm volatile("ld.relaxed.sys.global.u8 %0, [%1];"
                 : "=r"(piece.word[0])
                 : "l"(place)
                 : "memory");
  }
#elif !defined(__CUDACC__)
  piece = emulated_load<kBytes>(place);
#endif
  return piece;
}

// A piece of what this kernel writes as well: kBytes at a multiple of that.
template <int kBytes>
__device__ __forceinline__ Piece<kBytes> load(const void* place) {
  Piece<kBytes> piece;
#if defined(__CUDACC__)
  if constexpr (kBytes == 16) {
    const uint4 words = *static_cast<const uint4*>(place);
    piece.word[0] = words.x, piece.word[1] = words.y;
    piece.word[2] = words.z, piece.word[3] = words.w;
  } else if constexpr (kBytes == 8) {
    const uint2 words = *static_cast<const uint2*>(place);
    piece.word[0] = words.x, piece.word[1] = words.y;
  } else if constexpr (kBytes == 4) {
    piece.word[0] = *static_cast<const uint32_t*>(place);
  } else {
    static_assert(kBytes == 2);
    piece.word[0] = *static_cast<const uint16_t*>(place);
  }
#else
  piece = emulated_load<kBytes>(place);
#endif
  return piece;
}

template <int kBytes>
__device__ __forceinline__ void store(void* place, const Piece<kBytes>& piece) {
#if defined(__CUDACC__)
  if constexpr (kBytes == 16) {
    *static_cast<uint4*>(place) =
        make_uint4(piece.word[0], piece.word[1], piece.word[2], piece.word[3]);
  } else if constexpr (kBytes == 8) {
    *static_cast<uint2*>(place) = make_uint2(piece.word[0], piece.word[1]);
  } else if constexpr (kBytes == 4) {
    *static_cast<uint32_t*>(place) = piece.word[0];
  } else {
    static_assert(kBytes == 2);
    *static_cast<uint16_t*>(place) = static_cast<uint16_t>(piece.word[0]);
  }
#else
  emulator::check_aligned(place, kBytes);
  std::memcpy(place, piece.word, kBytes);
#endif
}

// Sixteen bytes that this kernel does not read again.
__device__ __forceinline__ void store_streamed(void* place, const uint32_t (&word)[4]) {
#if defined(__CUDA_ARCH__)
  asm volatile("st.global.cs.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(place), "r"(word[0]),
               "r"(word[1]), "r"(word[2]), "r"(word[3])
               : "memory");
#elif !defined(__CUDACC__)
  emulator::check_aligned(place, 16);
  std::memcpy(place, word, 16);
#endif
}

}  // namespace oper
