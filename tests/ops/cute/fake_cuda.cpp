// A CUDA driver without a GPU, compiled against the real cuda.h, so that a wrong layout of a
// structure shows. An image is text: "PARAMETERS KERNELS ERROR" with "8,8,4" for the sizes of the
// parameters (each at a multiple of its size).
#include <cuda.h>
#include <cstdio>
#include <cstdlib>
#include <cstring>

struct Kernel {
    size_t sizes[16];
    int params, kernels, error;
};

struct Launch {
    unsigned grid[3], block[3], shared, attrs, cluster[3];
    int pdl;
    CUstream stream;
    unsigned char params[128];
};

static Launch last;
static int launches, loads, next_error, contexts;
static thread_local CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_GLOBAL;
static thread_local CUcontext context;
static bool capturing;

static bool forbidden() { return capturing && mode != CU_STREAM_CAPTURE_MODE_RELAXED; }

extern "C" {

Launch *fake_last() { return &last; }
int fake_launches() { return launches; }
int fake_loads() { return loads; }
int fake_contexts() { return contexts; }
void fake_next_error(int error) { next_error = error; }
void fake_capture(int on) { capturing = on; }
int fake_mode() { return mode; }

CUresult cuGetErrorName(CUresult code, const char **text) {
    *text = code == CUDA_ERROR_NO_BINARY_FOR_GPU ? "CUDA_ERROR_NO_BINARY_FOR_GPU" : "CUDA_ERROR_FAKE";
    return CUDA_SUCCESS;
}
CUresult cuGetErrorString(CUresult, const char **text) {
    *text = "what the driver says";
    return CUDA_SUCCESS;
}
CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode *other) {
    CUstreamCaptureMode before = mode;
    mode = *other;
    *other = before;
    return CUDA_SUCCESS;
}
CUresult cuDeviceGet(CUdevice *device, int ordinal) {
    *device = ordinal;
    return CUDA_SUCCESS;
}
CUresult cuDevicePrimaryCtxRetain(CUcontext *out, CUdevice device) {
    *out = (CUcontext)(size_t)(0x1000 + device);
    return CUDA_SUCCESS;
}
CUresult cuCtxSetCurrent(CUcontext given) {
    context = given;
    contexts++;
    return CUDA_SUCCESS;
}
CUresult cuLibraryLoadData(CUlibrary *out, const void *code, CUjit_option *, void **, unsigned,
                           CUlibraryOption *, void **, unsigned) {
    if (forbidden()) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    Kernel *kernel = (Kernel *)calloc(1, sizeof(Kernel));
    char sizes[128];
    if (sscanf((const char *)code, "%127s %d %d", sizes, &kernel->kernels, &kernel->error) != 3)
        return CUDA_ERROR_INVALID_IMAGE;
    for (char *at = strtok(sizes, ","); at; at = strtok(nullptr, ","))
        kernel->sizes[kernel->params++] = atoi(at);
    *out = (CUlibrary)kernel;
    loads++;
    return (CUresult)kernel->error;
}
CUresult cuLibraryGetKernelCount(unsigned *count, CUlibrary library) {
    *count = ((Kernel *)library)->kernels;
    return CUDA_SUCCESS;
}
CUresult cuLibraryEnumerateKernels(CUkernel *kernels, unsigned count, CUlibrary library) {
    if (count != 1) return CUDA_ERROR_INVALID_VALUE;
    *kernels = (CUkernel)library;
    return CUDA_SUCCESS;
}
CUresult cuKernelGetParamInfo(CUkernel handle, size_t index, size_t *offset, size_t *size) {
    Kernel *kernel = (Kernel *)handle;
    if (index >= (size_t)kernel->params) return CUDA_ERROR_INVALID_VALUE;
    *offset = 0;
    for (size_t i = 0; i <= index; i++) {
        size_t bytes = kernel->sizes[i];
        *offset = (*offset + bytes - 1) / bytes * bytes + (i < index ? bytes : 0);
    }
    *size = kernel->sizes[index];
    return CUDA_SUCCESS;
}
CUresult cuKernelGetFunction(CUfunction *out, CUkernel kernel) {
    if (!context) return CUDA_ERROR_INVALID_CONTEXT;
    *out = (CUfunction)kernel;
    return CUDA_SUCCESS;
}
CUresult cuFuncLoad(CUfunction) { return forbidden() ? CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED : CUDA_SUCCESS; }

CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **params, void **) {
    if (!context) return CUDA_ERROR_INVALID_CONTEXT;
    if (next_error) {
        CUresult error = (CUresult)next_error;
        next_error = 0;
        return error;
    }
    Launch now = {{config->gridDimX, config->gridDimY, config->gridDimZ},
                  {config->blockDimX, config->blockDimY, config->blockDimZ},
                  config->sharedMemBytes, config->numAttrs, {0, 0, 0}, 0, config->hStream, {}};
    for (unsigned i = 0; i < config->numAttrs; i++) {
        const CUlaunchAttribute &x = config->attrs[i];
        if (x.id == CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION) {
            now.cluster[0] = x.value.clusterDim.x;
            now.cluster[1] = x.value.clusterDim.y;
            now.cluster[2] = x.value.clusterDim.z;
        } else if (x.id == CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION) {
            now.pdl = x.value.programmaticStreamSerializationAllowed;
        } else {
            return CUDA_ERROR_INVALID_VALUE;
        }
    }
    Kernel *kernel = (Kernel *)function;
    size_t at = 0;
    for (int i = 0; i < kernel->params; i++) {
        memcpy(now.params + at, params[i], kernel->sizes[i]);
        at += kernel->sizes[i];
    }
    last = now;
    launches++;
    return CUDA_SUCCESS;
}

}  // extern "C"
