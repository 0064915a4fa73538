/* runtime.h: a CUDA runtime and driver made of plain memory, for tests of the host files of
 * csrc/cuda. Included once in a program, behind the files that it tests.
 *
 * Every call is recorded as its name, with "@1" behind it where device 1 is current and "~" where
 * captures are relaxed; EXPECT_CALLS compares the record. A call that fail_call names fails. The
 * test sets the state of streams. A pending event becomes ready when the test says so, or when the
 * host waits for it. Memory holds POISON before it is written.
 */
#pragma once

#include "graphs.h"
#include "state.h"
#include "streams.h"

/* ---- Errors and devices -------------------------------------------------------------------- */

const char *
cudaGetErrorName(cudaError_t code)
{
    static _Thread_local char name[32];
    snprintf(name, sizeof name, "code %d", (int)code);
    return name;
}

const char *
cudaGetErrorString(cudaError_t code)
{
    return code == cudaErrorMemoryAllocation ? "out of memory" : "a text";
}

cudaError_t
cudaGetLastError(void)
{
    return answer("cudaGetLastError");
}

cudaError_t
cudaDriverGetVersion(int *version)
{
    *version = fake.driver_version;
    return cudaSuccess;
}

cudaError_t
cudaGetDeviceCount(int *count)
{
    const cudaError_t code = answer("cudaGetDeviceCount");
    *count = code == cudaSuccess ? fake.num_devices : 0;
    return code;
}

cudaError_t
cudaGetDevice(int *device)
{
    /* Recorded only where it may fail, because it is called everywhere. */
    const bool may_fail =
        fake.num_good >= 0 && fake.fails != NULL && strcmp(fake.fails, "cudaGetDevice") == 0;
    const cudaError_t code = may_fail ? answer("cudaGetDevice") : cudaSuccess;
    if (code == cudaSuccess) {
        *device = fake.current;
    }
    return code;
}

cudaError_t
cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr name, int device)
{
    const cudaError_t code =
        device >= fake.num_devices ? cudaErrorInvalidDevice : answer("cudaDeviceGetAttribute");
    if (code == cudaSuccess) {
        const int capability = device == fake.older && device > 0 ? 80 : fake.capability;
        *value = name == cudaDevAttrComputeCapabilityMajor         ? capability / 10
                 : name == cudaDevAttrComputeCapabilityMinor       ? capability % 10
                 : name == cudaDevAttrMultiProcessorCount          ? fake.num_sms
                 : name == cudaDevAttrMaxSharedMemoryPerBlockOptin ? fake.shared_bytes
                                                                   : -1;
    }
    return code;
}

static inline CUresult
fake_get_device(CUdevice *device, int ordinal)
{
    *device = ordinal;
    return (CUresult)answer("cuDeviceGet");
}

static inline CUresult
fake_retain_primary(CUcontext *context, CUdevice device)
{
    const CUresult result = (CUresult)answer("cuDevicePrimaryCtxRetain");
    if (result == CUDA_SUCCESS) {
        *context = &fake_contexts[device];
    }
    return result;
}

static int fake_former; /* the device that was current before the push; pushes do not nest */

static inline CUresult
fake_push_context(CUcontext context)
{
    const CUresult result = (CUresult)answer("cuCtxPushCurrent");
    if (result == CUDA_SUCCESS) {
        fake_former = fake.current;
        fake.current = context->device_id;
    }
    return result;
}

static inline CUresult
fake_pop_context(CUcontext *context)
{
    const CUresult result = (CUresult)answer("cuCtxPopCurrent");
    *context = &fake_contexts[fake.current];
    fake.current = fake_former;
    return result;
}

/* ---- Memory -------------------------------------------------------------------------------- */

static inline void *
get_memory(size_t bytes, int *num_alive)
{
    void *memory = malloc(bytes);
    EXPECT(memory != NULL && bytes > 0);
    memset(memory, POISON, bytes);
    (*num_alive)++;
    return memory;
}

cudaError_t
cudaMalloc(void **memory, size_t bytes)
{
    const cudaError_t code = answer("cudaMalloc");
    if (code == cudaSuccess) {
        *memory = get_memory(bytes, &fake.num_memory);
    }
    return code;
}

cudaError_t
cudaFree(void *memory)
{
    fake.num_memory--;
    free(memory);
    return answer("cudaFree");
}

cudaError_t
cudaHostAlloc(void **memory, size_t bytes, unsigned flags)
{
    const cudaError_t code = answer("cudaHostAlloc");
    EXPECT_EQ(flags, (unsigned)cudaHostAllocDefault);
    if (code == cudaSuccess) {
        *memory = get_memory(bytes, &fake.num_host);
    }
    return code;
}

cudaError_t
cudaFreeHost(void *memory)
{
    fake.num_host--;
    free(memory);
    return answer("cudaFreeHost");
}

cudaError_t
cudaPointerGetAttributes(struct cudaPointerAttributes *attributes, const void *pointer)
{
    const cudaError_t code = answer("cudaPointerGetAttributes");
    const uint8_t *const byte = pointer;
    const bool is_pinned = byte >= fake.pinned && byte < fake.pinned + fake.pinned_bytes;
    const bool is_mapped = byte >= fake.mapped && byte < fake.mapped + fake.mapped_bytes;
    *attributes = (struct cudaPointerAttributes){.type = cudaMemoryTypeUnregistered,
                                                 .device = fake.mapped_device};
    if (is_pinned) {
        attributes->type = cudaMemoryTypeHost;
        attributes->hostPointer = (void *)(uintptr_t)byte;
        attributes->devicePointer = fake.reached_at + (byte - fake.pinned);
    } else if (is_mapped) {
        attributes->type = cudaMemoryTypeDevice;
        attributes->devicePointer = (void *)(uintptr_t)byte;
    }
    return code;
}

cudaError_t
cudaMemsetAsync(void *memory, int value, size_t bytes, cudaStream_t stream)
{
    const cudaError_t code = answer("cudaMemsetAsync");
    EXPECT(find_fake_stream(stream) != &fake_default_stream);
    if (code == cudaSuccess) {
        memset(memory, value, bytes);
    }
    return code;
}

cudaError_t
cudaMemcpyAsync(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind,
                cudaStream_t stream)
{
    const cudaError_t code =
        answer(kind == cudaMemcpyHostToDevice ? "copy to device" : "copy to host");
    (void)stream;
    EXPECT(to != NULL && from != NULL);
    if (code == cudaSuccess && from != NULL) {
        memcpy(to, from, bytes);
    }
    return code;
}

/* ---- The driver's entry points ------------------------------------------------------------- */

cudaError_t
cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version,
                                 unsigned long long flags,
                                 enum cudaDriverEntryPointQueryResult *result)
{
    static const struct {
        const char *name;
        unsigned version; /* the first version of CUDA with this signature */
        void *function;
    } calls[] = {
        {"cuDeviceGet", 2000, (void *)fake_get_device},
        {"cuDevicePrimaryCtxRetain", 7000, (void *)fake_retain_primary},
        {"cuCtxPushCurrent", 4000, (void *)fake_push_context},
        {"cuCtxPopCurrent", 4000, (void *)fake_pop_context},
        {"cuStreamIsCapturing", 10000, (void *)fake_is_capturing},
        {"cuStreamGetId", 12000, (void *)fake_get_id},
        {"cuStreamGetCtx", 9020, (void *)fake_get_context},
        {"cuGraphExecKernelNodeSetParams", 12000, (void *)fake_set_params},
        {"cuStreamGetGreenCtx", 12040, (void *)fake_get_own_sms},
        {"cuGraphAddDependencies", 12030, (void *)fake_add_dependencies},
    };
    const cudaError_t code = answer("cudaGetDriverEntryPointByVersion");
    *result = cudaDriverEntryPointSymbolNotFound;
    EXPECT_EQ(flags, 0u);
    for (size_t i = 0; i < sizeof calls / sizeof calls[0] && code == cudaSuccess; i++) {
        const bool is_missing = fake.lacks != NULL && strcmp(fake.lacks, name) == 0;
        if (strcmp(calls[i].name, name) == 0 && version >= calls[i].version) {
            *function = is_missing && fake.has_no_address ? NULL : calls[i].function;
            *result = is_missing && !fake.has_no_address ? cudaDriverEntryPointSymbolNotFound
                                                         : cudaDriverEntryPointSuccess;
        }
    }
    return code;
}
