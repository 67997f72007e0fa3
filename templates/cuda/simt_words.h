// Words of CUDA that g++ has to be told of, and what marks the machine's functions and state; for every target.
#pragma once

#include <stdint.h>
#include <string.h>
#include <math.h>

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
