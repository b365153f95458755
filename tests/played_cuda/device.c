/* Devices and contexts, and the table by which cuda-bindings finds functions. */
#include "played.h"

pthread_mutex_t played_lock = PTHREAD_MUTEX_INITIALIZER;

/* A context is its device's number plus one; each thread has a stack of them. */
static _Thread_local intptr_t stack[16];
static _Thread_local int depth;

int current_device(void) { return depth ? (int)stack[depth - 1] - 1 : -1; }

static bool is_context(CUcontext context) {
    return (intptr_t)context >= 1 && (intptr_t)context <= DEVICES;
}

EXPORTED CUresult cuInit(unsigned flags) {
    WANT(flags == 0);
    return CUDA_SUCCESS;
}

EXPORTED CUresult cuDriverGetVersion(int *version) {
    *version = 13000;
    return CUDA_SUCCESS;
}

EXPORTED CUresult cuDeviceGet(CUdevice *device, int ordinal) {
    if (ordinal < 0 || ordinal >= DEVICES) return CUDA_ERROR_INVALID_DEVICE;
    *device = ordinal;
    return CUDA_SUCCESS;
}

EXPORTED CUresult cuDeviceGetCount(int *count) {
    *count = DEVICES;
    return CUDA_SUCCESS;
}

EXPORTED CUresult cuDeviceGetUuid(CUuuid *uuid, CUdevice device) {
    memset(uuid->bytes, 0xA0 + device, sizeof uuid->bytes);
    return CUDA_SUCCESS;
}

EXPORTED CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute which, CUdevice device) {
    WANT(device >= 0 && device < DEVICES);
    switch (which) {
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: *value = 9; return CUDA_SUCCESS;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: *value = 0; return CUDA_SUCCESS;
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: *value = 3; return CUDA_SUCCESS;
    default: return CUDA_ERROR_INVALID_VALUE;
    }
}

EXPORTED CUresult cuDeviceCanAccessPeer(int *can, CUdevice device, CUdevice peer) {
    WANT(device != peer);
    *can = getenv("PLAYED_CUDA_UNREACHABLE") == NULL;
    return CUDA_SUCCESS;
}

EXPORTED CUresult cuDeviceGetP2PAttribute(int *value, CUdevice_P2PAttribute which, CUdevice device,
                                          CUdevice peer) {
    WANT(device != peer && which == CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED);
    *value = getenv("PLAYED_CUDA_PCIE") == NULL;
    return CUDA_SUCCESS;
}

EXPORTED CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
    WANT(device >= 0 && device < DEVICES);
    *context = (CUcontext)(intptr_t)(device + 1);
    return CUDA_SUCCESS;
}

EXPORTED CUresult cuCtxGetCurrent(CUcontext *context) {
    *context = (CUcontext)(depth ? stack[depth - 1] : 0);
    return CUDA_SUCCESS;
}

EXPORTED CUresult cuCtxSetCurrent(CUcontext context) {
    WANT(is_context(context));
    if (!depth) depth = 1;
    stack[depth - 1] = (intptr_t)context;
    return CUDA_SUCCESS;
}

EXPORTED CUresult cuCtxPushCurrent(CUcontext context) {
    WANT(is_context(context) && depth < 16);
    stack[depth++] = (intptr_t)context;
    return CUDA_SUCCESS;
}

EXPORTED CUresult cuCtxPopCurrent(CUcontext *context) {
    WANT(depth > 0);
    *context = (CUcontext)stack[--depth];
    return CUDA_SUCCESS;
}

EXPORTED CUresult cuCtxEnablePeerAccess(CUcontext peer, unsigned flags) {
    static bool enabled;
    WANT(is_context(peer) && flags == 0);
    WANT_CONTEXT();
    if (enabled) return CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED;
    enabled = true;
    return CUDA_SUCCESS;
}

/* Every function by the name without a version, as cuGetProcAddress is asked for it. */
#define NAMES(each) \
    each(cuInit) each(cuDriverGetVersion) each(cuDeviceGet) each(cuDeviceGetCount) \
    each(cuDeviceGetUuid) each(cuDeviceGetAttribute) each(cuDeviceCanAccessPeer) \
    each(cuDeviceGetP2PAttribute) \
    each(cuDevicePrimaryCtxRetain) each(cuCtxGetCurrent) each(cuCtxSetCurrent) \
    each(cuCtxPushCurrent) \
    each(cuCtxPopCurrent) each(cuCtxEnablePeerAccess) each(cuStreamCreate) \
    each(cuStreamDestroy) each(cuStreamSynchronize) each(cuStreamWaitEvent) \
    each(cuStreamWaitValue32) each(cuEventCreate) each(cuEventDestroy) each(cuEventRecord) \
    each(cuEventQuery) each(cuEventSynchronize) each(cuMemAlloc) each(cuMemPoolCreate) \
    each(cuMemPoolSetAttribute) each(cuMemAllocFromPoolAsync) each(cuMemFreeAsync) \
    each(cuMemHostAlloc) each(cuMemHostRegister) each(cuMemHostUnregister) \
    each(cuMemHostGetDevicePointer) each(cuMemGetAddressRange) each(cuPointerGetAttribute) \
    each(cuMemcpyAsync) \
    each(cuIpcGetMemHandle) each(cuIpcOpenMemHandle) each(cuIpcCloseMemHandle) \
    each(cuMemCreate) each(cuMemRelease) each(cuMemAddressReserve) each(cuMemAddressFree) \
    each(cuMemMap) each(cuMemUnmap) each(cuMemSetAccess) each(cuMemGetAllocationGranularity) \
    each(cuMemRetainAllocationHandle) each(cuMemExportToShareableHandle) \
    each(cuMemImportFromShareableHandle) each(cuModuleLoadData) each(cuModuleGetFunction) \
    each(cuFuncGetAttribute) \
    each(cuLaunchKernel)

#ifndef CUDA_VERSION
#define each(name) extern CUresult name();
NAMES(each)
#undef each
#endif
CUresult batch_of_cuda_12(CUdeviceptr *, CUdeviceptr *, size_t *, size_t, CUmemcpyAttributes *,
                          size_t *, size_t, size_t *, CUstream);

EXPORTED CUresult cuGetProcAddress(const char *, void **, int, cuuint64_t,
                                   CUdriverProcAddressQueryResult *);

#define each(name) {#name, (void *)name},
static const struct { const char *name; void *function; } functions[] = {
    NAMES(each)
    {"cuMemcpyBatchAsync", (void *)batch_of_cuda_12},
    {"cuGetProcAddress", (void *)cuGetProcAddress},
};
#undef each

EXPORTED CUresult cuGetProcAddress(const char *name, void **function, int version,
                                   cuuint64_t flags,
                                   CUdriverProcAddressQueryResult *result) {
    (void)flags;
    *function = NULL;
    for (size_t i = 0; i < sizeof functions / sizeof *functions; i++) {
        if (!strcmp(functions[i].name, name)) *function = functions[i].function;
    }
    /* The batched copy had another form from CUDA 13 on: only the older one is played. */
    if (!strcmp(name, "cuMemcpyBatchAsync") && version != 12080) *function = NULL;
    if (result)
        *result = *function ? CU_GET_PROC_ADDRESS_SUCCESS : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
    return *function ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}
