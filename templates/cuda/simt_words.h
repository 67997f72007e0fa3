// Words of CUDA that g++ has to be told of, and what marks the machine's functions and state; for every target.
#pragma once

#include <stdint.h>
#ifdef SIMT_MACHINE
#include <string.h>
#include <math.h>
#else
// What kernels call of these two headers: to read them takes a tenth of the time of a kernel.
extern "C" {
void* memcpy(void*, const void*, __SIZE_TYPE__) noexcept;
#define SIMT_OF_ONE(name) double name(double) noexcept; float name##f(float) noexcept;
#define SIMT_OF_TWO(name) double name(double, double) noexcept; float name##f(float, float) noexcept;
SIMT_OF_ONE(fabs) SIMT_OF_ONE(floor) SIMT_OF_ONE(ceil) SIMT_OF_ONE(trunc) SIMT_OF_ONE(rint) SIMT_OF_ONE(sqrt)
SIMT_OF_ONE(exp) SIMT_OF_ONE(exp2) SIMT_OF_ONE(expm1) SIMT_OF_ONE(log) SIMT_OF_ONE(log2) SIMT_OF_ONE(log1p)
SIMT_OF_ONE(sin) SIMT_OF_ONE(cos) SIMT_OF_ONE(tanh) SIMT_OF_ONE(erf)
SIMT_OF_TWO(fmin) SIMT_OF_TWO(fmax) SIMT_OF_TWO(pow) SIMT_OF_TWO(fmod) SIMT_OF_TWO(copysign)
double fma(double, double, double) noexcept;
float fmaf(float, float, float) noexcept;
}
#define isnan(x) __builtin_isnan(x)
#define isinf(x) __builtin_isinf(x)
#define isfinite(x) __builtin_isfinite(x)
#define signbit(x) __builtin_signbit(x)
#define NAN __builtin_nanf("")
#define INFINITY __builtin_inff()
#endif

#define __global__ __attribute__((visibility("default")))
#define __device__ inline
#define __forceinline__
#define __shared__
#define __align__(n)
#define __grid_constant__
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __maxnreg__(...)
#define __restrict__

#define SIMT __attribute__((visibility("default")))
#ifdef SIMT_MACHINE
#define SIMT_STATE SIMT
#else
#define SIMT_STATE extern SIMT
#endif

struct Dim { unsigned x, y, z; };
