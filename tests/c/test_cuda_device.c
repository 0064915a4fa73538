/* test_cuda_device.c: which devices csrc/cuda/host/device.c lets a call use, how it makes them
 * current and words errors, and what it asks of streams, on the fake runtime of runtime.h.
 */
#include "fake_cuda/devices.h"

/* ---- Facts --------------------------------------------------------------------------------- */

/* Facts that are read once are read under the lock. */
static void
expect_locked(const char *call)
{
    if (strcmp(call, "cudaDeviceGetAttribute") == 0 ||
        strcmp(call, "cuDevicePrimaryCtxRetain") == 0) {
        expect_held(&slots_lock);
    }
}

static void
test_facts(void)
{
    begin();
    fake_watch = expect_locked;
    smla_cuda_guard guard;
    EXPECT_OK(smla_cuda_enter(op, 1, &guard, &error));
    smla_cuda_leave(&guard);
    fake_watch = NULL;
    EXPECT_EQ(count_calls("cudaDeviceGetAttribute"), 4);
    EXPECT_EQ(count_calls("cuDevicePrimaryCtxRetain"), 1);
    begin();
    fake.capability = 103;
    fake.num_sms = 148;
    fake.shared_bytes = 1234;
    const smla_cuda_device *const device = smla_cuda_find_device(1);
    EXPECT(device != NULL && device->compute_capability == 103 && device->num_sms == 148);
    EXPECT(device != NULL && device->max_shared_bytes == 1234);
    EXPECT_EQ(count_calls("cudaDeviceGetAttribute"), 4);
    EXPECT(smla_cuda_find_device(1) == device); /* read once */
    EXPECT_EQ(count_calls("cudaDeviceGetAttribute"), 4);
    EXPECT(smla_cuda_find_device(0) != device);
    EXPECT(smla_cuda_find_device(2) == NULL);
    EXPECT(smla_cuda_find_device(-1) == NULL);
    EXPECT(smla_cuda_find_device(SMLA_CUDA_MAX_DEVICES) == NULL);
    for (int n = 0; n < 4; n++) { /* a fact that could not be read is asked for again */
        begin();
        fail_call("cudaDeviceGetAttribute", n, cudaErrorUnknown);
        EXPECT(smla_cuda_find_device(0) == NULL);
        EXPECT(smla_cuda_find_device(0) != NULL);
    }
}

static void
test_capped_architecture(void)
{
    static const struct {
        const char *text;
        int capability, expected;
    } cases[] = {
        {"80", 90, 80}, {"90", 90, 90}, {"89", 90, 89},  {"91", 90, 90},
        {"79", 90, 90}, {"", 90, 90},   {"90", 120, 90}, {"x", 90, 90},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        begin();
        set_env("SPARSE_MLA_CUDA_ARCH", cases[i].text);
        fake.capability = cases[i].capability;
        EXPECT_EQ(smla_cuda_find_device(0)->compute_capability, cases[i].expected);
    }
}

static void
test_is_set(void)
{
    static const struct {
        const char *text;
        bool expected;
    } cases[] = {{NULL, false}, {"", false}, {"0", false}, {"1", true}, {"00", true}, {"x", true}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        set_env("NAME", cases[i].text);
        EXPECT_EQ(smla_cuda_is_set("NAME"), cases[i].expected);
        EXPECT(!smla_cuda_is_set("OTHER"));
    }
}

static void
expect_no_device(int32_t device_id, const char *text)
{
    EXPECT_FAIL(smla_cuda_check_device(op, device_id, &error), SMLA_ERROR_RUNTIME, text);
    EXPECT(strncmp(error.text, "some_op: ", 9) == 0);
}

static void
test_check_device(void)
{
    begin();
    EXPECT_OK(smla_cuda_check_device(op, 0, &error));
    EXPECT_OK(smla_cuda_check_device(op, 1, &error));
    expect_no_device(2, "must be one of this machine's (cuda:0 to cuda:1), got cuda:2");
    expect_no_device(-1, "(cuda:0 to cuda:1), got cuda:-1");
    fake.num_devices = 100;
    expect_no_device(64, "(cuda:0 to cuda:63), got cuda:64");
    begin();
    fake.capability = 80;
    EXPECT_OK(smla_cuda_check_device(op, 0, &error));
    fake.capability = 79;
    expect_no_device(1, "must have compute capability 8.0 or newer, got 7.9 (cuda:1)");
    begin();
    fail_call("cudaDeviceGetAttribute", 0, cudaErrorIllegalAddress);
    expect_no_device(1, "cudaDeviceGetAttribute failed: a text (code 700): an earlier kernel");
    begin();
    fail_call("cudaDeviceGetAttribute", 0, cudaErrorUnknown);
    expect_no_device(0, "cudaDeviceGetAttribute failed");
    begin();
    fake.num_devices = 0;
    expect_no_device(0, "must be visible to the process, got none: look at nvidia-smi");
    static const struct {
        cudaError_t code;
        int version;
        const char *text;
    } cases[] = {
        {cudaErrorInsufficientDriver, 0, "must have an NVIDIA driver, got none: libcuda.so.1"},
        {cudaErrorInsufficientDriver, 11040, "got one for 11.4: update the driver"},
        {cudaErrorInsufficientDriver, 11000, "got one for 11.0: update the driver"},
        {cudaErrorNoDevice, 12080, "must be visible to the process, got none"},
        {cudaErrorInitializationError, 12080,
         "cudaGetDeviceCount failed: a text (code 3): a "
         "process that was forked"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        begin();
        fake.num_devices = 0;
        fake.driver_version = cases[i].version;
        fail_call("cudaGetDeviceCount", 0, cases[i].code);
        expect_no_device(0, cases[i].text);
    }
    char version[64];
    snprintf(version, sizeof version, "new enough for CUDA %d.%d, got", CUDART_VERSION / 1000,
             CUDART_VERSION / 10 % 100);
    begin();
    fake.num_devices = 0;
    fail_call("cudaGetDeviceCount", 0, cudaErrorInsufficientDriver);
    expect_no_device(0, version);
}

/* ---- Errors -------------------------------------------------------------------------------- */

static void
test_status(void)
{
    static const struct {
        cudaError_t code;
        const char *end;
    } hints[] = {
        {cudaErrorUnknown, "(code 999)"},
        {cudaErrorInvalidResourceHandle, "stream of this device, and not yet destroyed?"},
        {cudaErrorIllegalAddress, "shows which kernel"},
        {cudaErrorMisalignedAddress, "shows which kernel"},
        {cudaErrorIllegalInstruction, "shows which kernel"},
        {cudaErrorInvalidAddressSpace, "shows which kernel"},
        {cudaErrorInvalidPc, "shows which kernel"},
        {cudaErrorHardwareStackError, "shows which kernel"},
        {cudaErrorLaunchFailure, "shows which kernel"},
        {cudaErrorLaunchTimeout, "shows which kernel"},
        {cudaErrorAssert, "shows which kernel"},
        {cudaErrorECCUncorrectable, "shows which kernel"},
        {cudaErrorNoKernelImageForDevice, "its architecture in SPARSE_MLA_CUDA_ARCHS"},
        {cudaErrorInvalidDeviceFunction, "its architecture in SPARSE_MLA_CUDA_ARCHS"},
        {cudaErrorUnsupportedPtxVersion, "its architecture in SPARSE_MLA_CUDA_ARCHS"},
        {cudaErrorJitCompilerNotFound, "its architecture in SPARSE_MLA_CUDA_ARCHS"},
        {cudaErrorStreamCaptureUnsupported, "cannot hold or stand beside this call"},
        {cudaErrorStreamCaptureInvalidated, "cannot hold or stand beside this call"},
        {cudaErrorStreamCaptureImplicit, "cannot hold or stand beside this call"},
        {cudaErrorStreamCaptureIsolation, "cannot hold or stand beside this call"},
        {cudaErrorStreamCaptureWrongThread, "cannot hold or stand beside this call"},
        {cudaErrorInitializationError, "start workers by spawn"},
    };
    begin();
    EXPECT_OK(smla_cuda_status(op, "call", cudaSuccess, &error));
    EXPECT_FAIL(smla_cuda_status(op, "call", cudaErrorMemoryAllocation, &error), SMLA_ERROR_MEMORY,
                "some_op: call failed: out of memory (code 2)");
    for (size_t i = 0; i < sizeof hints / sizeof hints[0]; i++) {
        EXPECT_FAIL(smla_cuda_status(op, "call", hints[i].code, &error), SMLA_ERROR_RUNTIME,
                    "some_op: call failed: a text (code ");
        const size_t length = strlen(error.text);
        const size_t end = strlen(hints[i].end);
        EXPECT(length > end && strcmp(error.text + length - end, hints[i].end) == 0);
    }
}

/* ---- The guard ----------------------------------------------------------------------------- */

/* The driver's functions must not be known when this runs, so it comes first in main. */
static void
test_guard(void)
{
    smla_cuda_guard guard;
    begin();
    EXPECT_OK(smla_cuda_enter(op, 0, &guard, &error)); /* current: nothing is asked */
    smla_cuda_leave(&guard);
    EXPECT_CALLS("");
    static const char *const lacks[] = {"cuDeviceGet", "cuDevicePrimaryCtxRetain",
                                        "cuCtxPushCurrent", "cuCtxPopCurrent"};
    for (int i = 0; i < 8; i++) {
        fake.lacks = lacks[i / 2];
        fake.has_no_address = i % 2;
        EXPECT_FAIL(smla_cuda_enter(op, 1, &guard, &error), SMLA_ERROR_RUNTIME,
                    "some_op: cuDevicePrimaryCtxRetain failed: a text (code 500)");
        EXPECT(!guard.is_pushed);
    }
    fake.lacks = NULL;
    fail_call("cudaGetDriverEntryPointByVersion", 0, cudaErrorInsufficientDriver);
    EXPECT_FAIL(smla_cuda_enter(op, 1, &guard, &error), SMLA_ERROR_RUNTIME, "(code 35)");
    forget_calls();
    EXPECT_OK(smla_cuda_enter(op, 1, &guard, &error));
    EXPECT_EQ(fake.current, 1);
    smla_cuda_leave(&guard);
    EXPECT_EQ(fake.current, 0);
    EXPECT_CALLS("cudaGetDriverEntryPointByVersion cudaGetDriverEntryPointByVersion "
                 "cudaGetDriverEntryPointByVersion cudaGetDriverEntryPointByVersion "
                 "cuDeviceGet cuDevicePrimaryCtxRetain cuCtxPushCurrent cuCtxPopCurrent@1 ");
    EXPECT_OK(smla_cuda_enter(op, 1, &guard, &error)); /* retained once */
    smla_cuda_leave(&guard);
    EXPECT_CALLS("cuCtxPushCurrent cuCtxPopCurrent@1 ");
    fake.current = 1; /* the way from another device to device 0, and back */
    EXPECT_OK(smla_cuda_enter(op, 0, &guard, &error));
    EXPECT_EQ(fake.current, 0);
    smla_cuda_leave(&guard);
    EXPECT_EQ(fake.current, 1);
    fake.current = 0;

    static const struct {
        const char *call, *text;
    } cases[] = {
        {"cudaGetDevice", "some_op: cudaGetDevice failed: a text (code 719)"},
        {"cuDeviceGet", "some_op: cuDevicePrimaryCtxRetain failed: a text (code 719)"},
        {"cuDevicePrimaryCtxRetain", "some_op: cuDevicePrimaryCtxRetain failed: a text (code 719)"},
        {"cuCtxPushCurrent", "some_op: cuCtxPushCurrent failed: a text (code 719)"},
    };
    for (int i = 0; i < 4; i++) {
        begin();
        guard.is_pushed = true;
        fail_call(cases[i].call, 0, cudaErrorLaunchFailure);
        EXPECT_FAIL(smla_cuda_enter(op, 1, &guard, &error), SMLA_ERROR_RUNTIME, cases[i].text);
        EXPECT(!guard.is_pushed);
        EXPECT_EQ(fake.current, 0);
        EXPECT_OK(smla_cuda_enter(op, 1, &guard, &error)); /* the next call works */
        smla_cuda_leave(&guard);
    }
    begin();
    EXPECT_FAIL(smla_cuda_enter(op, 2, &guard, &error), SMLA_ERROR_RUNTIME, "got cuda:2");
    fake.capability = 75;
    EXPECT_FAIL(smla_cuda_enter(op, 1, &guard, &error), SMLA_ERROR_RUNTIME, "got 7.5 (cuda:1)");
}

/* ---- Streams ------------------------------------------------------------------------------- */

/* The number of devices must not be known when this runs. */
static void
test_check_stream(void)
{
    const smla_stream own = {.device_id = 0, .handle = &streams[0]};
    const smla_stream foreign = {.device_id = 0, .handle = &streams[1]};
    begin();
    fail_call("cudaGetDeviceCount", 0, cudaErrorUnknown); /* a failure is not remembered */
    EXPECT_OK(smla_cuda_check_stream(op, foreign, &error));
    void *const defaults[] = {NULL, cudaStreamLegacy, cudaStreamPerThread};
    forget_calls();
    for (int i = 0; i < 3; i++) {
        EXPECT_OK(smla_cuda_check_stream(op, (smla_stream){1, defaults[i]}, &error));
    }
    EXPECT_CALLS("");
    EXPECT_OK(smla_cuda_check_stream(op, own, &error));
    EXPECT_CALLS("cudaGetDeviceCount cudaStreamIsCapturing cudaStreamGetDevice~ ");
    EXPECT_FAIL(smla_cuda_check_stream(op, foreign, &error), SMLA_ERROR_VALUE,
                "some_op: `stream` must be a stream of the arrays' device, cuda:0, got one of "
                "cuda:1");
    EXPECT_CALLS("cudaStreamIsCapturing cudaStreamGetDevice~ ");
    streams[1].is_capturing = true; /* such a stream cannot be asked */
    EXPECT_OK(smla_cuda_check_stream(op, foreign, &error));
    EXPECT_CALLS("cudaStreamIsCapturing ");
    streams[1].is_capturing = false;
    fail_call("cudaStreamIsCapturing", 0, cudaErrorUnknown);
    EXPECT_FAIL(smla_cuda_check_stream(op, foreign, &error), SMLA_ERROR_RUNTIME,
                "cudaStreamIsCapturing failed");
    fail_call("cudaStreamGetDevice", 0, cudaErrorUnknown);
    EXPECT_FAIL(smla_cuda_check_stream(op, own, &error), SMLA_ERROR_RUNTIME,
                "cudaStreamGetDevice failed");
    EXPECT_EQ((int)fake_mode, (int)cudaStreamCaptureModeGlobal);
}

static void
test_captures(void)
{
    bool is_capturing = true;
    begin();
    EXPECT_OK(smla_cuda_is_capturing(op, (smla_stream){0, &streams[0]}, &is_capturing, &error));
    EXPECT(!is_capturing);
    streams[0].is_capturing = true;
    EXPECT_OK(smla_cuda_is_capturing(op, (smla_stream){0, &streams[0]}, &is_capturing, &error));
    EXPECT(is_capturing);
    fake_mode = cudaStreamCaptureModeThreadLocal;
    const enum cudaStreamCaptureMode former = smla_cuda_relax_captures();
    EXPECT_EQ((int)former, (int)cudaStreamCaptureModeThreadLocal);
    EXPECT_EQ((int)fake_mode, (int)cudaStreamCaptureModeRelaxed);
    smla_cuda_restore_captures(former);
    EXPECT_EQ((int)fake_mode, (int)cudaStreamCaptureModeThreadLocal);
    fake_mode = cudaStreamCaptureModeGlobal;
}

int
main(void)
{
    RUN(test_guard);
    RUN(test_check_stream);
    RUN(test_facts);
    RUN(test_capped_architecture);
    RUN(test_is_set);
    RUN(test_check_device);
    RUN(test_status);
    RUN(test_captures);
    return report("test_cuda_device");
}
