// Functions compiled for several generations of a processor, the best of which is taken when the
// library is loaded. Their loops are plain, and become vectors of each generation's width; none may
// contract a product and a sum into one rounding (-ffp-contract=off in setup.py), so that results
// are equal on all machines. Nothing may be thrown through them: GCC takes what picks a clone for a
// function that throws nothing, and ends the process.
#pragma once

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(__CUDACC__)
#define OPER_SIMD __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define OPER_SIMD
#endif
#define OPER_INLINE inline __attribute__((always_inline))

// Marks functions that kernels of a device share with those of the processor.
#if defined(__CUDACC__)
#define OPER_HD __host__ __device__
#else
#define OPER_HD
#endif
