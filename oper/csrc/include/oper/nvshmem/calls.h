// NVSHMEM's calls: its own, and for the emulator the tests' stand-in.
#pragma once

#include "oper/cuda/device.h"

#if defined(__CUDACC__)
#include <nvshmem.h>
#include <nvshmemx.h>
#else
#include "fake_nvshmem.h"
#endif
