/* device.c: facts about devices, error texts, the device guard, captures, and checks of streams.
 *
 * Errors come from return codes alone. The error that cudaGetLastError holds may belong to somebody
 * else's call, so it is left there. No driver needs to be loaded; without a driver every query
 * answers "no device".
 */
#include <cudaTypedefs.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "cuda/host/cuda.h"

enum { MIN_COMPUTE_CAPABILITY = 80 };

/* ---- Facts --------------------------------------------------------------------------------- */

/* The facts of a device that the process has found. Each fact is found once, under slots_lock. */
typedef struct device_slot {
    atomic_bool is_known; /* whether the facts are written, and may be read without the lock */
    smla_cuda_device facts;
    CUcontext primary; /* the primary context; NULL until a guard needs it */
} device_slot;

static device_slot slots[SMLA_CUDA_MAX_DEVICES];
static pthread_mutex_t slots_lock = PTHREAD_MUTEX_INITIALIZER;

bool
smla_cuda_is_set(const char *name)
{
    const char *const value = getenv(name);
    return value != NULL && value[0] != '\0' && strcmp(value, "0") != 0;
}

/* Lowers the capability to SPARSE_MLA_CUDA_ARCH, so that kernels of newer architectures are left
 * out. This serves to test the portable kernels where others would be chosen, and to compare. */
static int32_t
cap_capability(int32_t capability)
{
    const char *const text = getenv("SPARSE_MLA_CUDA_ARCH");
    const long cap = text == NULL ? 0 : strtol(text, NULL, 10);
    return cap >= MIN_COMPUTE_CAPABILITY && cap < capability ? (int32_t)cap : capability;
}

static cudaError_t
read_facts(int32_t device_id, smla_cuda_device *facts)
{
    int major = 0;
    int minor = 0;
    const struct {
        enum cudaDeviceAttr name;
        int *value;
    } attributes[] = {
        {cudaDevAttrComputeCapabilityMajor, &major},
        {cudaDevAttrComputeCapabilityMinor, &minor},
        {cudaDevAttrMultiProcessorCount, &facts->num_sms},
        {cudaDevAttrMaxSharedMemoryPerBlockOptin, &facts->max_shared_bytes},
    };
    for (int i = 0; i < 4; i++) {
        const cudaError_t code =
            cudaDeviceGetAttribute(attributes[i].value, attributes[i].name, device_id);
        if (code != cudaSuccess) {
            return code;
        }
    }
    facts->compute_capability = cap_capability(major * 10 + minor);
    return cudaSuccess;
}

static device_slot *
find_slot(int32_t device_id)
{
    return device_id >= 0 && device_id < SMLA_CUDA_MAX_DEVICES ? &slots[device_id] : NULL;
}

static cudaError_t
learn_facts(int32_t device_id, device_slot *slot)
{
    pthread_mutex_lock(&slots_lock);
    cudaError_t code = cudaSuccess;
    if (!atomic_load_explicit(&slot->is_known, memory_order_relaxed)) {
        code = read_facts(device_id, &slot->facts);
        atomic_store_explicit(&slot->is_known, code == cudaSuccess, memory_order_release);
    }
    pthread_mutex_unlock(&slots_lock);
    return code;
}

/* Finds the facts of a device. Inline, because every call asks a dozen times for facts that are
 * known. */
static inline cudaError_t
find_facts(int32_t device_id, const smla_cuda_device **facts)
{
    device_slot *const slot = find_slot(device_id);
    if (slot == NULL) {
        return cudaErrorInvalidDevice;
    }
    *facts = &slot->facts;
    return atomic_load_explicit(&slot->is_known, memory_order_acquire)
               ? cudaSuccess
               : learn_facts(device_id, slot);
}

const smla_cuda_device *
smla_cuda_find_device(int32_t device_id)
{
    const smla_cuda_device *device = NULL;
    return find_facts(device_id, &device) == cudaSuccess ? device : NULL;
}

/* Reports why the driver shows no device at all. */
static smla_status
report_driver(const char *op, cudaError_t code, smla_error *error)
{
    int version = 0;
    (void)cudaDriverGetVersion(&version);
    if (code == cudaErrorInsufficientDriver && version == 0) {
        return smla_fail(
            error, SMLA_ERROR_RUNTIME,
            "%s: CUDA devices must have an NVIDIA driver, got none: libcuda.so.1 cannot be "
            "loaded",
            op);
    }
    if (code == cudaErrorInsufficientDriver) {
        return smla_fail(
            error, SMLA_ERROR_RUNTIME,
            "%s: the NVIDIA driver must be new enough for CUDA %d.%d, got one for %d.%d: update "
            "the driver, or rebuild with an older toolkit (CUDA_HOME)",
            op, CUDART_VERSION / 1000, CUDART_VERSION % 1000 / 10, version / 1000,
            version % 1000 / 10);
    }
    if (code == cudaErrorNoDevice) {
        return smla_fail(
            error, SMLA_ERROR_RUNTIME,
            "%s: CUDA devices must be visible to the process, got none: look at nvidia-smi "
            "and CUDA_VISIBLE_DEVICES",
            op);
    }
    return smla_cuda_status(op, "cudaGetDeviceCount", code, error);
}

/* Reports why the facts of a device could not be read. */
static smla_status
report_device(const char *op, int32_t device_id, cudaError_t code, smla_error *error)
{
    int count = 0;
    const cudaError_t count_code = cudaGetDeviceCount(&count);
    if (count_code != cudaSuccess || count == 0) {
        return report_driver(op, count_code != cudaSuccess ? count_code : cudaErrorNoDevice, error);
    }
    if (count > SMLA_CUDA_MAX_DEVICES) {
        count = SMLA_CUDA_MAX_DEVICES;
    }
    if (device_id >= 0 && device_id < count) {
        return smla_cuda_status(op, "cudaDeviceGetAttribute", code, error);
    }
    return smla_fail(error, SMLA_ERROR_RUNTIME,
                     "%s: the CUDA device must be one of this machine's (cuda:0 to cuda:%d), got "
                     "cuda:%d",
                     op, count - 1, device_id);
}

smla_status
smla_cuda_check_device(const char *op, int32_t device_id, smla_error *error)
{
    const smla_cuda_device *device = NULL;
    const cudaError_t code = find_facts(device_id, &device);
    if (code != cudaSuccess) {
        return report_device(op, device_id, code, error);
    }
    if (device->compute_capability < MIN_COMPUTE_CAPABILITY) {
        return smla_fail(error, SMLA_ERROR_RUNTIME,
                         "%s: CUDA devices must have compute capability %d.%d or newer, got %d.%d "
                         "(cuda:%d)",
                         op, MIN_COMPUTE_CAPABILITY / 10, MIN_COMPUTE_CAPABILITY % 10,
                         device->compute_capability / 10, device->compute_capability % 10,
                         device_id);
    }
    return SMLA_OK;
}

/* ---- Error texts --------------------------------------------------------------------------- */

static const char lost_hint[] =
    ": an earlier kernel of this process may be the cause, and the device is lost to it from now "
    "on; SPARSE_MLA_CHECK=1 or compute-sanitizer shows which kernel";
static const char no_kernel_hint[] =
    ": this build has no code for this device; rebuild with its architecture in "
    "SPARSE_MLA_CUDA_ARCHS";
static const char capture_hint[] =
    ": a CUDA graph is being captured, and cannot hold or stand beside this call";

/* Returns a hint at the usual cause of an error, or "". */
static const char *
find_hint(cudaError_t code)
{
    switch (code) {
    case cudaErrorInvalidResourceHandle:
        return ": is `stream` a stream of this device, and not yet destroyed?";
    case cudaErrorIllegalAddress:
    case cudaErrorMisalignedAddress:
    case cudaErrorIllegalInstruction:
    case cudaErrorInvalidAddressSpace:
    case cudaErrorInvalidPc:
    case cudaErrorHardwareStackError:
    case cudaErrorLaunchFailure:
    case cudaErrorLaunchTimeout:
    case cudaErrorAssert:
    case cudaErrorECCUncorrectable: return lost_hint;
    case cudaErrorNoKernelImageForDevice:
    case cudaErrorInvalidDeviceFunction:
    case cudaErrorUnsupportedPtxVersion:
    case cudaErrorJitCompilerNotFound: return no_kernel_hint;
    case cudaErrorStreamCaptureUnsupported:
    case cudaErrorStreamCaptureInvalidated:
    case cudaErrorStreamCaptureImplicit:
    case cudaErrorStreamCaptureIsolation:
    case cudaErrorStreamCaptureWrongThread: return capture_hint;
    case cudaErrorInitializationError:
        return ": a process that was forked after CUDA was used cannot use it; start workers by "
               "spawn";
    default: return "";
    }
}

smla_status
smla_cuda_status(const char *op, const char *call, cudaError_t code, smla_error *error)
{
    if (code == cudaSuccess) {
        return SMLA_OK;
    }
    const smla_status status =
        code == cudaErrorMemoryAllocation ? SMLA_ERROR_MEMORY : SMLA_ERROR_RUNTIME;
    return smla_fail(error, status, "%s: %s failed: %s (%s)%s", op, call, cudaGetErrorString(code),
                     cudaGetErrorName(code), find_hint(code));
}

/* ---- Guard --------------------------------------------------------------------------------- */

/* A device becomes current when its primary context is pushed, which only the driver can do. Two
 * calls of cudaSetDevice would leave a context on the former device, which takes half a gigabyte on
 * a device that the process may never use. They would also replace a current context that somebody
 * else made. */
typedef struct driver_calls {
    PFN_cuDeviceGet_v2000 get_device;
    PFN_cuDevicePrimaryCtxRetain_v7000 retain_primary;
    PFN_cuCtxPushCurrent_v4000 push_context;
    /* Found last; if it is not NULL, all others are found, too. */
    PFN_cuCtxPopCurrent_v4000 pop_context;
} driver_calls;

static driver_calls driver; /* written under slots_lock, constant after the first push */

cudaError_t
smla_cuda_find_driver_calls(const smla_cuda_symbol *calls, int count, unsigned version)
{
    for (int i = 0; i < count; i++) {
        void *address = NULL;
        enum cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
        const cudaError_t code = cudaGetDriverEntryPointByVersion(calls[i].name, &address, version,
                                                                  cudaEnableDefault, &result);
        if (code != cudaSuccess) {
            return code;
        }
        if (result != cudaDriverEntryPointSuccess || address == NULL) {
            return cudaErrorSymbolNotFound;
        }
        memcpy(calls[i].function, (const void *)&address, sizeof address);
    }
    return cudaSuccess;
}

static cudaError_t
find_driver(void)
{
    const smla_cuda_symbol calls[] = {
        {"cuDeviceGet", (void *)&driver.get_device},
        {"cuDevicePrimaryCtxRetain", (void *)&driver.retain_primary},
        {"cuCtxPushCurrent", (void *)&driver.push_context},
        {"cuCtxPopCurrent", (void *)&driver.pop_context},
    };
    return driver.pop_context != NULL ? cudaSuccess : smla_cuda_find_driver_calls(calls, 4, 12000);
}

/* Finds the device's primary context, which stays retained until the process ends. The caller holds
 * slots_lock. Error numbers mean the same in the driver and in the runtime. */
static cudaError_t
find_primary(int32_t device_id, CUcontext *primary)
{
    device_slot *slot = find_slot(device_id);
    if (slot == NULL) {
        return cudaErrorInvalidDevice;
    }
    if (slot->primary == NULL) {
        CUdevice device = 0;
        const cudaError_t code = find_driver();
        if (code != cudaSuccess) {
            return code;
        }
        CUresult result = driver.get_device(&device, device_id);
        if (result == CUDA_SUCCESS) {
            result = driver.retain_primary(&slot->primary, device);
        }
        if (result != CUDA_SUCCESS) {
            return (cudaError_t)result;
        }
    }
    *primary = slot->primary;
    return cudaSuccess;
}

static smla_status
push_primary(const char *op, int32_t device_id, smla_error *error)
{
    CUcontext primary = NULL;
    SMLA_TRY(smla_cuda_check_device(op, device_id, error));
    pthread_mutex_lock(&slots_lock);
    const cudaError_t code = find_primary(device_id, &primary);
    pthread_mutex_unlock(&slots_lock);
    SMLA_TRY(smla_cuda_status(op, "cuDevicePrimaryCtxRetain", code, error));
    return smla_cuda_status(op, "cuCtxPushCurrent", (cudaError_t)driver.push_context(primary),
                            error);
}

smla_status
smla_cuda_enter(const char *op, int32_t device_id, smla_cuda_guard *guard, smla_error *error)
{
    int current = -1;
    guard->is_pushed = false;
    SMLA_TRY(smla_cuda_status(op, "cudaGetDevice", cudaGetDevice(&current), error));
    if (current != device_id) {
        SMLA_TRY(push_primary(op, device_id, error));
        guard->is_pushed = true;
    }
    return SMLA_OK;
}

void
smla_cuda_leave(const smla_cuda_guard *guard)
{
    if (guard->is_pushed) {
        CUcontext primary;
        (void)driver.pop_context(&primary);
    }
}

/* ---- Captures ------------------------------------------------------------------------------ */

smla_status
smla_cuda_is_capturing(const char *op, smla_stream stream, bool *is_capturing, smla_error *error)
{
    enum cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
    if (stream.handle == NULL) { /* the legacy stream is never captured */
        *is_capturing = false;
        return SMLA_OK;
    }
    const cudaError_t code = cudaStreamIsCapturing((cudaStream_t)stream.handle, &capture);
    *is_capturing = capture != cudaStreamCaptureStatusNone;
    return smla_cuda_status(op, "cudaStreamIsCapturing", code, error);
}

enum cudaStreamCaptureMode
smla_cuda_relax_captures(void)
{
    enum cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    (void)cudaThreadExchangeStreamCaptureMode(&mode);
    return mode;
}

void
smla_cuda_restore_captures(enum cudaStreamCaptureMode former)
{
    (void)cudaThreadExchangeStreamCaptureMode(&former);
}

/* ---- Streams ------------------------------------------------------------------------------- */

/* Whether the process sees several devices, so that a stream may belong to another one. */
static bool
has_several_devices(void)
{
    static atomic_int num_devices; /* 0 until the number is known */
    int count = atomic_load_explicit(&num_devices, memory_order_relaxed);
    if (count == 0 && cudaGetDeviceCount(&count) == cudaSuccess) {
        atomic_store_explicit(&num_devices, count, memory_order_relaxed);
    }
    return count > 1;
}

/* Refuses a stream of another device. Default streams pass, because every device has them. A
 * capturing stream passes, because cudaStreamGetDevice would end its capture. */
smla_status
smla_cuda_check_stream(const char *op, smla_stream stream, smla_error *error)
{
    const cudaStream_t handle = (cudaStream_t)stream.handle;
    int device_id = stream.device_id;
    bool is_capturing = false;
    if (handle == NULL || handle == cudaStreamLegacy || handle == cudaStreamPerThread ||
        !has_several_devices()) {
        return SMLA_OK;
    }
    SMLA_TRY(smla_cuda_is_capturing(op, stream, &is_capturing, error));
    if (is_capturing) {
        return SMLA_OK;
    }
    const enum cudaStreamCaptureMode former = smla_cuda_relax_captures();
    const cudaError_t code = cudaStreamGetDevice(handle, &device_id);
    smla_cuda_restore_captures(former);
    SMLA_TRY(smla_cuda_status(op, "cudaStreamGetDevice", code, error));
    if (device_id != stream.device_id) {
        return smla_fail_value(
            error, op,
            "`stream` must be a stream of the arrays' device, cuda:%d, got one of cuda:%d",
            stream.device_id, device_id);
    }
    return SMLA_OK;
}
