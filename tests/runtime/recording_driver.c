// A CUDA driver without a GPU: it loads nothing, and notes what every launch passes.

#include "cuda.h"
#include <stdlib.h>
#include <string.h>

#define MOST 4096
#define API __attribute__((visibility("default"))) CUresult

static unsigned char record[1 << 20];
static size_t length;
static int functions, encoded;
static struct { int count; int bytes[128]; } expected[MOST];

static void note(const void *value, size_t bytes)
{
    if (length + bytes <= sizeof record) {
        memcpy(record + length, value, bytes);
        length += bytes;
    }
}

// Sizes of the parameters of a function.
__attribute__((visibility("default"))) void recording_expect(unsigned long long function, int count, const int *bytes)
{
    expected[function].count = count;
    memcpy(expected[function].bytes, bytes, count * sizeof *bytes);
}

// What was noted since the last call.
__attribute__((visibility("default"))) size_t recording_take(unsigned char *to)
{
    size_t taken = length;
    memcpy(to, record, taken);
    length = 0;
    return taken;
}

// How many tensor maps were encoded.
__attribute__((visibility("default"))) int recording_encoded(void) { return encoded; }

API cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **params, void **extra)
{
    size_t number = (size_t)function;
    unsigned long long head[] = {number, config->gridDimX, config->gridDimY, config->gridDimZ, config->blockDimX,
                                 config->sharedMemBytes, (unsigned long long)config->hStream, config->numAttrs};
    note(head, sizeof head);
    for (int i = 0; i < expected[number].count; i++)
        note(params[i], expected[number].bytes[i]);
    return CUDA_SUCCESS;
}

API cuTensorMapEncodeTiled(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *address,
                           const cuuint64_t *sizes, const cuuint64_t *strides, const cuuint32_t *box,
                           const cuuint32_t *steps, CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                           CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill)
{
    struct { void *address; cuuint64_t strides[4]; cuuint32_t sizes[5]; unsigned short box[5]; unsigned char kind[8]; } made;
    memset(&made, 0, sizeof made);
    made.address = address;
    for (cuuint32_t i = 0; i < rank; i++) {
        made.sizes[i] = (cuuint32_t)sizes[i];
        made.box[i] = (unsigned short)(box[i] * steps[i]);
        if (i + 1 < rank)
            made.strides[i] = strides[i];
    }
    unsigned char kind[] = {type, rank, interleave, swizzle, promotion, fill};
    memcpy(made.kind, kind, sizeof kind);
    _Static_assert(sizeof made <= sizeof *map, "a tensor map has 128 bytes");
    memset(map, 0, sizeof *map);
    memcpy(map, &made, sizeof made);
    encoded++;
    return CUDA_SUCCESS;
}

API cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name)
{
    *function = (CUfunction)(size_t)(++functions % MOST);
    return CUDA_SUCCESS;
}

API cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction function)
{
    *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0;
    return CUDA_SUCCESS;
}

API cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device)
{
    *value = 232448;  // bytes of shared memory; nothing else is looked at
    return CUDA_SUCCESS;
}

API cuPointerGetAttribute(void *value, CUpointer_attribute attribute, CUdeviceptr pointer)
{
    memcpy(value, &pointer, sizeof pointer);
    return CUDA_SUCCESS;
}

API cuGetErrorString(CUresult error, const char **text)
{
    *text = "an error";
    return CUDA_SUCCESS;
}

API cuCtxGetCurrent(CUcontext *context)
{
    *context = (CUcontext)1;
    return CUDA_SUCCESS;
}

API cuCtxGetLimit(size_t *value, CUlimit limit)
{
    *value = 0;
    return CUDA_SUCCESS;
}

API cuDriverGetVersion(int *version)
{
    *version = CUDA_VERSION;
    return CUDA_SUCCESS;
}

API cuInit(unsigned flags) { return CUDA_SUCCESS; }
API cuCtxSetCurrent(CUcontext context) { return CUDA_SUCCESS; }
API cuCtxSetLimit(CUlimit limit, size_t value) { return CUDA_SUCCESS; }
API cuDeviceGet(CUdevice *device, int number) { return CUDA_SUCCESS; }
API cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) { return CUDA_SUCCESS; }
API cuModuleLoadData(CUmodule *module, const void *image) { return CUDA_SUCCESS; }
API cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value) { return CUDA_SUCCESS; }
API cuFuncSetCacheConfig(CUfunction function, CUfunc_cache config) { return CUDA_SUCCESS; }
API cuOccupancyMaxActiveClusters(int *count, CUfunction function, const CUlaunchConfig *config) { return CUDA_SUCCESS; }
