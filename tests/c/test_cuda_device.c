/* test_cuda_device.c: which devices csrc/cuda/host/device.c lets a call use, how it makes them
 * current and words errors; which values checked.c reads; and how cuda_backend.c puts a call
 * together. The runtime is that of runtime.h, and operators do nothing.
 */
#include <stdlib.h>

static char *test_getenv(const char *name);
static void *test_malloc(size_t size);
static void test_free(void *memory);

#define getenv test_getenv
#include "core/params_all.h"

#include "cuda/host/device.c" // NOLINT(bugprone-suspicious-include)
#undef getenv
#define malloc      test_malloc
#define free        test_free
#define slots       slot_array  /* device.c has `slots`, too */
#define free_arrays free_copies /* testing.h has `free_arrays`, too */
#include "cuda/host/checked.c"  // NOLINT(bugprone-suspicious-include)
#undef malloc
#undef free
#undef slots
#undef free_arrays
#include "cuda/cuda_backend.c" // NOLINT(bugprone-suspicious-include)

/* ---- Operators that do nothing, in front of testing.h, which has a global `error` ----------- */

static cudaError_t launch_code;
static const smla_cuda_device *launch_device;

static cudaError_t launch_nothing(const char *name);

#define LAUNCHER(name, args_type, params_type, family)                                             \
    cudaError_t smla_cuda_launch_##name(const params_type *params, const smla_cuda_device *device) \
    {                                                                                              \
        (void)params;                                                                              \
        launch_device = device;                                                                    \
        return launch_nothing(#name);                                                              \
    }

SMLA_LAUNCHED_OPERATORS(LAUNCHER)
LAUNCHER(fill_step_lists, smla_v4_build_args, smla_step_lists_params, step)
LAUNCHER(key_ranges, smla_mla_attention_args, smla_key_ranges_params, attention)

cudaError_t
smla_cuda_launch_projection_e4m3(const smla_projection_params *params)
{
    (void)params;
    return launch_nothing("e4m3_project");
}

smla_status
smla_cuda_sparse_attention(const smla_attention_params *params, const smla_attention_plan *plan,
                           smla_error *error)
{
    if (plan == NULL || plan->num_runs != 1) {
        abort(); /* the caller's plan was not handed on */
    }
    return smla_cuda_status(params->call.op, "a kernel", launch_nothing("attention"), error);
}

smla_status
smla_cuda_projection(const smla_projection_params *params, smla_error *error)
{
    return smla_cuda_status(params->call.op, "a kernel", launch_nothing("project"), error);
}

/* Other tests cover the rest of the backend's table. */
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wunused-parameter"
#define ABSENT(type, name, ...) \
    type name(__VA_ARGS__)      \
    {                           \
        abort();                \
    }
ABSENT(void, smla_cuda_plan_attention, const smla_attention_shape *s, smla_attention_plan *p)
ABSENT(bool, smla_cuda_prefers_direct, const smla_attention_shape *s, int64_t r, int64_t c)
ABSENT(int64_t, smla_cuda_attention_workspace_size, const smla_attention_shape *s)
ABSENT(const char *, smla_cuda_kernel_name, const smla_attention_run *r)
ABSENT(int64_t, smla_cuda_kernels, smla_kernel_info *r, int64_t c)
ABSENT(void *, smla_cuda_allocate, int32_t d, int64_t b)
ABSENT(void, smla_cuda_release, int32_t d, void *m)
ABSENT(smla_mirror *, smla_cuda_create_mirror, int32_t d, int64_t b)
ABSENT(void, smla_cuda_destroy_mirror, smla_mirror *m)
ABSENT(smla_status, smla_cuda_begin_write, const char *o, smla_mirror *m, smla_stream s, void **h,
       smla_error *e)
ABSENT(smla_status, smla_cuda_end_write, const char *o, smla_mirror *m, smla_stream s,
       smla_error *e)
ABSENT(smla_status, smla_cuda_begin_use, const char *o, smla_mirror *m, smla_stream s,
       smla_error *e)
ABSENT(smla_status, smla_cuda_end_use, const char *o, smla_mirror *m, smla_stream s, smla_error *e)
const smla_stream_ops smla_cuda_stream_ops = {.record = NULL};
#pragma GCC diagnostic pop

/* What the checks of the CPU backend get. */
static smla_status cpu_status;
static smla_cache_write_params seen_write;
static smla_gather_params seen_gather;
static smla_convert_params seen_convert;
static smla_rope seen_rope;
static smla_topk_slots_params seen_global_topk;
static smla_combine_topk_swa_params seen_combine;
static smla_mixed_indices_params seen_mixed;
static int64_t seen_sum; /* the sum of the arrays' values */
static const int32_t device_zeros[4];
static const uint8_t device_flags[4];
static int num_device_arrays; /* arrays that the checks got instead of copies */

static int64_t
sum_of(const int32_t *data, int64_t count, int64_t stride)
{
    int64_t sum = 0;
    for (int64_t i = 0; data != NULL && i < count; i++) {
        sum += data[i * stride];
    }
    return sum;
}

smla_status
smla_cpu_check_cache_write(const smla_cache_write_params *p, smla_error *error)
{
    seen_write = *p;
    num_device_arrays += p->slot_mapping == device_zeros;
    seen_sum = 0;
    for (int64_t i = 0; i < p->num_tokens; i++) {
        seen_sum += p->slots_are_int64 ? ((const int64_t *)p->slot_mapping)[i * p->slot_stride]
                                       : ((const int32_t *)p->slot_mapping)[i * p->slot_stride];
    }
    return cpu_status == SMLA_OK ? SMLA_OK : smla_fail(error, cpu_status, "the CPU's");
}

smla_status
smla_cpu_check_gather(const smla_gather_params *p, smla_error *error)
{
    seen_gather = *p;
    num_device_arrays += (p->block_table == device_zeros) + (p->seq_lens == device_zeros) +
                         (p->workspace_starts == device_zeros) + (p->seq_starts == device_zeros);
    seen_sum = 0;
    for (int64_t i = 0; i < p->num_reqs; i++) {
        seen_sum += sum_of(p->block_table + i * p->block_table_stride_req, p->num_blocks,
                           p->block_table_stride_block);
    }
    seen_sum += 1000 * sum_of(p->seq_lens, p->num_reqs, p->seq_lens_stride);
    seen_sum += 1000000 * sum_of(p->workspace_starts, p->num_reqs, p->workspace_starts_stride);
    seen_sum += 1000000000 * sum_of(p->seq_starts, p->num_reqs, p->seq_starts_stride);
    seen_sum += 7 * sum_of(p->gather_lens, p->num_reqs, p->gather_lens_stride);
    return cpu_status == SMLA_OK ? SMLA_OK : smla_fail(error, cpu_status, "the CPU's");
}

smla_status
smla_cpu_check_convert(const smla_convert_params *p, smla_error *error)
{
    seen_convert = *p;
    num_device_arrays += p->req_id_per_token == device_zeros;
    seen_sum = sum_of(p->req_id_per_token, p->num_tokens, p->req_id_stride);
    seen_sum += 1000 * sum_of(p->prefill_request_ids, p->num_tokens, p->prefill_request_ids_stride);
    seen_sum += 1000000 * sum_of(p->prefill_workspace_starts, p->num_prefills,
                                 p->prefill_workspace_starts_stride);
    return cpu_status == SMLA_OK ? SMLA_OK : smla_fail(error, cpu_status, "the CPU's");
}

smla_status
smla_cpu_check_logits(const smla_logits_params *p, smla_error *error)
{
    num_device_arrays += p->context_lens == device_zeros || p->req_id_per_token == device_zeros;
    return cpu_status == SMLA_OK ? SMLA_OK : smla_fail(error, cpu_status, "the CPU's");
}

smla_status
smla_cpu_check_positions(const char *op, const smla_rope *rope, const char *table,
                         int64_t num_tokens, smla_error *error)
{
    (void)op;
    (void)table;
    seen_rope = *rope;
    num_device_arrays += rope->positions == device_zeros;
    seen_sum = 0;
    for (int64_t i = 0; i < num_tokens; i++) {
        const int64_t at = i * rope->positions_stride;
        seen_sum += rope->positions_are_int64 ? ((const int64_t *)rope->positions)[at]
                                              : ((const int32_t *)rope->positions)[at];
    }
    return cpu_status == SMLA_OK ? SMLA_OK : smla_fail(error, cpu_status, "the CPU's");
}

static int64_t
sum_of_flags(const uint8_t *data, int64_t count, int64_t stride)
{
    int64_t sum = 0;
    for (int64_t i = 0; data != NULL && i < count; i++) {
        sum += data[i * stride];
    }
    return sum;
}

static int64_t
sum_of_starts(const smla_query_batch *batch)
{
    return sum_of(batch->query_start_loc, batch->num_reqs + 1, batch->query_start_loc_stride);
}

smla_status
smla_cpu_check_global_topk(const smla_topk_slots_params *p, smla_error *error)
{
    seen_global_topk = *p;
    num_device_arrays += (p->req_id_per_token == device_zeros) + (p->is_valid == device_flags);
    seen_sum = sum_of(p->req_id_per_token, p->num_tokens, p->req_id_stride);
    seen_sum += 1000 * sum_of_flags(p->is_valid, p->num_tokens, p->is_valid_stride);
    return cpu_status == SMLA_OK ? SMLA_OK : smla_fail(error, cpu_status, "the CPU's");
}

smla_status
smla_cpu_check_combine_topk_swa(const smla_combine_topk_swa_params *p, smla_error *error)
{
    seen_combine = *p;
    num_device_arrays += (p->batch.query_start_loc == device_zeros) +
                         (p->batch.seq_lens == device_zeros) + (p->gather_lens == device_zeros);
    seen_sum = sum_of_starts(&p->batch) +
               100 * sum_of(p->batch.seq_lens, p->batch.num_reqs, p->batch.seq_lens_stride) +
               10000 * sum_of(p->gather_lens, p->batch.num_reqs, p->gather_lens_stride);
    return cpu_status == SMLA_OK ? SMLA_OK : smla_fail(error, cpu_status, "the CPU's");
}

static bool
is_device_array(const void *array)
{
    return array == device_zeros;
}

smla_status
smla_cpu_check_partial_states(const smla_partial_states_params *p, smla_error *error)
{
    num_device_arrays += is_device_array(p->positions);
    return smla_cpu_check_cache_write(&p->rows, error);
}

smla_status
smla_cpu_check_compress(const smla_compress_params *p, smla_error *error)
{
    num_device_arrays += is_device_array(p->rope.positions) + is_device_array(p->req_id_per_token) +
                         is_device_array(p->table.block_table) +
                         is_device_array(p->states.rows.slot_mapping);
    return smla_cpu_check_cache_write(&p->insert, error);
}

smla_status
smla_cpu_check_mixed_indices(const smla_mixed_indices_params *p, smla_error *error)
{
    seen_mixed = *p;
    num_device_arrays += (p->batch.query_start_loc == device_zeros) +
                         (p->req_id_per_token == device_zeros) + (p->is_valid == device_flags);
    seen_sum = sum_of_starts(&p->batch);
    seen_sum += 1000 * sum_of(p->req_id_per_token, p->num_tokens, p->req_id_stride);
    seen_sum += 1000000 * sum_of_flags(p->is_valid, p->num_decode_tokens, p->is_valid_stride);
    return cpu_status == SMLA_OK ? SMLA_OK : smla_fail(error, cpu_status, "the CPU's");
}

/* ---- Devices ------------------------------------------------------------------------------- */

#include "fake_cuda/runtime.h"
#include "operator_numbers.h"

static cudaError_t
launch_nothing(const char *name)
{
    (void)answer(name);
    return launch_code;
}

/* The one environment variable that is set. */
static const char *env_name;
static const char *env_text;

static char *
test_getenv(const char *name)
{
    return env_name != NULL && strcmp(name, env_name) == 0 ? (char *)env_text : NULL;
}

static bool has_memory = true;
static size_t asked_bytes;

static int num_live; /* live copies of arrays */

static void *
test_malloc(size_t size)
{
    asked_bytes = size;
    num_live += has_memory;
    return has_memory ? malloc(size) : NULL;
}

static void
test_free(void *memory)
{
    num_live -= memory != NULL;
    free(memory);
}

static void
set_env(const char *name, const char *text)
{
    env_name = name;
    env_text = text;
}

static const char op[] = "some_op";
static struct CUstream_st streams[2];

/* The state of a new process that knows the driver's functions: two devices, 0 is current. */
static void
begin(void)
{
    reset_fake();
    memset(slots, 0, sizeof slots);
    fake.num_devices = 2;
    set_env(NULL, NULL);
    has_memory = true;
    for (int i = 0; i < 2; i++) {
        streams[i] = (struct CUstream_st){.id = 10 + (unsigned long long)i, .device_id = i};
    }
}

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

/* ---- Operators ----------------------------------------------------------------------------- */

/* The CUDA backend's calls: the operators, what the builder's metadata needs, and what
 * mla_attention runs first. */
enum { CALL_fill_step_lists = NUM_OPERATORS, CALL_find_key_ranges, NUM_CALLS };

#define NAME(name, args_type, params_type, family) [OP_##name] = #name,

static const char *const call_names[NUM_CALLS] = {
    SMLA_OPERATORS(NAME) SMLA_PROJECTIONS(NAME)[OP_sparse_attention] = "sparse_attention",
    [OP_sparse_mla_dsv4] = "sparse_mla_dsv4",
    [OP_mla_attention] = "mla_attention",
    [CALL_fill_step_lists] = "MetadataBuilder.build",
    [CALL_find_key_ranges] = "mla_attention",
};

static const char *const launch_names[NUM_CALLS] = {
    SMLA_LAUNCHED_OPERATORS(NAME)[OP_lightning_indexer] =
        "top_k_per_row",                 /* logits are not asked for */
    [OP_fp8_linear] = "scaled_quantize", /* then e4m3_project */
    [OP_k_up_proj] = "project",
    [OP_v_up_proj] = "project",
    [OP_kv_up_proj] = "project",
    [OP_grouped_output_projection] = "e4m3_project",
    [OP_sparse_attention] = "attention",
    [OP_sparse_mla_dsv4] = "attention",
    [OP_mla_attention] = "attention",
    [CALL_fill_step_lists] = "fill_step_lists",
    [CALL_find_key_ranges] = "key_ranges",
};

#undef NAME

/* Whether a call starts its kernels itself, rather than through a launcher with a device. */
static bool
starts_kernels(int i)
{
    return i == OP_sparse_attention || i == OP_sparse_mla_dsv4 || i == OP_mla_attention ||
           i == OP_k_up_proj || i == OP_v_up_proj || i == OP_kv_up_proj;
}

/* How many arrays a checked call of an operator copies to the host. */
static const int num_reads_of[NUM_CALLS] = {
    [OP_concat_and_cache_mla] = 1,
    [OP_quantize_and_insert_k_cache] = 1,
    [OP_indexer_k_quant_and_cache] = 1,
    [OP_gather_kv_cache] = 3,
    [OP_dequantize_and_gather_k_cache] = 3,
    [OP_convert_req_index_to_global_index] = 1,
    [OP_compute_global_topk_indices_and_lens] = 2,
    [OP_combine_topk_swa_indices] = 1,
    [OP_build_mixed_sparse_indices] = 3,
    [OP_top_k_per_row] = 2,
    [OP_fused_qnorm_rope_kv_insert] = 2,
    [OP_apply_rope] = 1,
    [OP_rope_and_cache_mla] = 2,
    [OP_fused_inv_rope_fp8_quant] = 1,
    [OP_save_partial_states] = 2,
    [OP_compress_norm_rope_store] = 5,
    [OP_fused_indexer_q_rope_quant] = 1,
    [OP_indexer_logits] = 2,
    [OP_lightning_indexer] = 4,
};

/* Calls an operator for `count` tokens, requests or the like; dynamic_per_tensor_quant ignores
 * `count`. */
static smla_status
call_operator(int i, smla_stream stream, int64_t count)
{
    const smla_backend *const b = &smla_cuda_backend;
    const smla_call call = {.op = call_names[i], .stream = stream};
    const smla_cache_write_params write = {.call = call,
                                           .num_tokens = count,
                                           .slot_mapping = device_zeros,
                                           .slot_stride = 1};
    const smla_gather_params gather = {.call = call,
                                       .num_reqs = count,
                                       .num_blocks = 1,
                                       .block_table = device_zeros,
                                       .seq_lens = device_zeros,
                                       .workspace_starts = device_zeros};
    const smla_dequantize_params dequantize = {.call = call,
                                               .kv = {.num_pages = count, .block_size = 1}};
    const smla_convert_params convert = {.call = call,
                                         .num_tokens = count,
                                         .req_id_per_token = device_zeros};
    const smla_attention_params attention = {.call = call, .num_tokens = count};
    const smla_attention_plan plan = {.num_runs = 1};
    const smla_varlen_params varlen = {.call = call, .num_tokens = count, .num_reqs = 1};
    const smla_merge_params merge = {.call = call, .num_tokens = count, .num_heads = 1};
    const smla_split_kv_b_proj_params weight = {.call = call, .nope_dim = count};
    const smla_absorb_params absorb = {.call = call, .num_rows = count, .num_latents = 1};
    const smla_projection_params project = {.call = call, .num_tokens = 1, .outer_dim = count};
    const smla_projection_params project_e4m3 = {.call = call,
                                                 .num_tokens = count,
                                                 .outer_dim = 1,
                                                 .is_e4m3 = true};
    const smla_scaled_quantize_params scaled = {.call = call,
                                                .num_row_groups = count,
                                                .num_column_groups = 1};
    const smla_fp8_linear_params linear = {.call = call,
                                           .quantize = scaled,
                                           .project = project_e4m3};
    const smla_quant_params quant = {.call = call};
    const smla_q_kv_norm_params norm = {.call = call, .num_tokens = count};
    const smla_inverse_rope_params turn_back = {.call = call,
                                                .num_tokens = count,
                                                .rope = {.positions = device_zeros, .max_pos = 1}};
    const smla_apply_rope_params apply_rope = {.call = call,
                                               .num_tokens = count,
                                               .q = {.num_heads = 1},
                                               .rope = turn_back.rope};
    const smla_rope_and_cache_params rope_and_cache = {.call = call,
                                                       .queries = apply_rope,
                                                       .insert = write};
    const smla_index_query_params index_query = {.call = call,
                                                 .num_tokens = count,
                                                 .rope = turn_back.rope};
    const smla_logits_params logits = {.call = call,
                                       .num_tokens = count,
                                       .num_columns = 1,
                                       .has_pages = true,
                                       .context_lens = device_zeros,
                                       .req_id_per_token = device_zeros};
    const smla_topk_slots_params global_topk = {.call = call,
                                                .num_tokens = count,
                                                .req_id_per_token = device_zeros,
                                                .is_valid = device_flags};
    smla_top_k_params top_k = {.call = call, .num_tokens = count, .slots = global_topk};
    top_k.slots.out = (int32_t[1]){0};
    const smla_lightning_params lightning = {.call = call,
                                             .logits = logits,
                                             .top_k = top_k,
                                             .chunk_tokens = 1};
    const smla_qnorm_insert_params insert_queries = {.call = call,
                                                     .num_tokens = count,
                                                     .rope = turn_back.rope,
                                                     .insert = write};
    const smla_partial_states_params save = {.call = call,
                                             .rows = write,
                                             .positions = device_zeros};
    const smla_compress_params compress = {.call = call,
                                           .states = {.rows = write},
                                           .table = {.block_table = device_zeros, .num_blocks = 1},
                                           .num_reqs = 1,
                                           .req_id_per_token = device_zeros,
                                           .rope = turn_back.rope,
                                           .insert = write};
    const smla_query_batch batch = {.query_start_loc = device_zeros};
    const smla_combine_topk_swa_params combine = {.call = call,
                                                  .num_tokens = count,
                                                  .batch = batch};
    const smla_mixed_indices_params mixed = {.call = call,
                                             .num_tokens = count,
                                             .num_decode_tokens = count,
                                             .batch = batch,
                                             .req_id_per_token = device_zeros,
                                             .is_valid = device_flags};
    const smla_step_lists_params step_lists = {.call = call, .num_rows = count};
    const smla_key_ranges_params ranges = {.call = call, .reqs.num_tokens = count};
    switch (i) {
    case OP_concat_and_cache_mla: return b->concat_and_cache_mla(&write, &error);
    case OP_quantize_and_insert_k_cache: return b->quantize_and_insert_k_cache(&write, &error);
    case OP_indexer_k_quant_and_cache: return b->indexer_k_quant_and_cache(&write, &error);
    case OP_gather_kv_cache: return b->gather_kv_cache(&gather, &error);
    case OP_dequantize_and_gather_k_cache: return b->dequantize_and_gather_k_cache(&gather, &error);
    case OP_dequantize_kv_cache: return b->dequantize_kv_cache(&dequantize, &error);
    case OP_convert_req_index_to_global_index:
        return b->convert_req_index_to_global_index(&convert, &error);
    case OP_varlen_attention: return b->varlen_attention(&varlen, &error);
    case OP_merge_attn_states: return b->merge_attn_states(&merge, &error);
    case OP_split_kv_b_proj: return b->split_kv_b_proj(&weight, &error);
    case OP_absorb_q_proj: return b->absorb_q_proj(&absorb, &error);
    case OP_absorb_o_proj: return b->absorb_o_proj(&absorb, &error);
    case OP_dynamic_per_tensor_quant: return b->dynamic_per_tensor_quant(&quant, &error);
    case OP_scaled_quantize: return b->scaled_quantize(&scaled, &error);
    case OP_fp8_linear: return b->fp8_linear(&linear, &error);
    case OP_fused_q_kv_rmsnorm: return b->fused_q_kv_rmsnorm(&norm, &error);
    case OP_apply_rope: return b->apply_rope(&apply_rope, &error);
    case OP_rope_and_cache_mla: return b->rope_and_cache_mla(&rope_and_cache, &error);
    case OP_fused_inv_rope_fp8_quant: return b->fused_inv_rope_fp8_quant(&turn_back, &error);
    case OP_compute_global_topk_indices_and_lens:
        return b->compute_global_topk_indices_and_lens(&global_topk, &error);
    case OP_combine_topk_swa_indices: return b->combine_topk_swa_indices(&combine, &error);
    case OP_build_mixed_sparse_indices: return b->build_mixed_sparse_indices(&mixed, &error);
    case OP_fused_qnorm_rope_kv_insert:
        return b->fused_qnorm_rope_kv_insert(&insert_queries, &error);
    case OP_top_k_per_row: return b->top_k_per_row(&top_k, &error);
    case OP_fused_indexer_q_rope_quant: return b->fused_indexer_q_rope_quant(&index_query, &error);
    case OP_indexer_logits: return b->indexer_logits(&logits, &error);
    case OP_save_partial_states: return b->save_partial_states(&save, &error);
    case OP_compress_norm_rope_store: return b->compress_norm_rope_store(&compress, &error);
    case OP_lightning_indexer: return b->lightning_indexer(&lightning, &error);
    case OP_k_up_proj:
    case OP_v_up_proj:
    case OP_kv_up_proj: return b->projection(&project, &error);
    case OP_grouped_output_projection: return b->projection(&project_e4m3, &error);
    case CALL_fill_step_lists: return b->fill_step_lists(&step_lists, &error);
    case CALL_find_key_ranges: return b->find_key_ranges(&ranges, &error);
    default: return b->sparse_attention(&attention, &plan, &error);
    }
}

/* The calls of an operator whose launches are `first`, and `second` or nothing. */
static void
list_calls(const char *first, const char *second, char *calls, size_t size)
{
    snprintf(calls, size,
             "cuCtxPushCurrent cudaStreamIsCapturing@1 cudaStreamGetDevice@1~ %s@1 "
             "%scuCtxPopCurrent@1 ",
             first, second);
}

/* Every operator runs with its stream's device current, or reports why it cannot. */
static void
test_operators(void)
{
    const smla_stream stream = {.device_id = 1, .handle = &streams[1]};
    const smla_stream foreign = {.device_id = 1, .handle = &streams[0]};
    begin();
    cpu_status = SMLA_OK;
    EXPECT_OK(call_operator(OP_concat_and_cache_mla, stream, 1));
    for (int i = 0; i < NUM_CALLS; i++) {
        char calls[256];
        char text[128];
        list_calls(launch_names[i], i == OP_fp8_linear ? "e4m3_project@1 " : "", calls,
                   sizeof calls);
        forget_calls();
        launch_device = NULL;
        EXPECT_OK(call_operator(i, stream, 1));
        EXPECT_CALLS(calls);
        const bool is_launched = !starts_kernels(i) && i != OP_grouped_output_projection;
        EXPECT(launch_device == (is_launched ? smla_cuda_find_device(1) : NULL));
        if (i != OP_dynamic_per_tensor_quant) { /* nothing to do */
            EXPECT_OK(call_operator(i, stream, 0));
            EXPECT_CALLS("");
        }
        launch_code = cudaErrorUnknown;
        snprintf(text, sizeof text, "%s: %s failed: a text (code 999)", call_names[i],
                 starts_kernels(i) ? "a kernel" : "cudaLaunchKernelExC");
        list_calls(launch_names[i], "", calls, sizeof calls);
        EXPECT_FAIL(call_operator(i, stream, 1), SMLA_ERROR_RUNTIME, text);
        EXPECT_CALLS(calls);
        launch_code = cudaSuccess;
        snprintf(text, sizeof text, "%s: `stream` must be a stream of the arrays' device",
                 call_names[i]);
        EXPECT_FAIL(call_operator(i, foreign, 1), SMLA_ERROR_VALUE, text);
        EXPECT_EQ(count_calls(launch_names[i]), 0);
        EXPECT_EQ(fake.current, 0);
        snprintf(text, sizeof text, "%s: the CUDA device must be one of", call_names[i]);
        EXPECT_FAIL(call_operator(i, (smla_stream){2, NULL}, 1), SMLA_ERROR_RUNTIME, text);
        fail_call("cuCtxPushCurrent", 0, cudaErrorUnknown);
        snprintf(text, sizeof text, "%s: cuCtxPushCurrent failed", call_names[i]);
        EXPECT_FAIL(call_operator(i, stream, 1), SMLA_ERROR_RUNTIME, text);
        EXPECT_EQ(count_calls(launch_names[i]), 0);
        EXPECT_EQ(fake.current, 0);
    }
    const smla_merge_params no_heads = {.call = {.stream = {2, NULL}}, .num_tokens = 1};
    EXPECT_OK(smla_cuda_backend.merge_attn_states(&no_heads, &error));
    const smla_projection_params no_tokens = {.call = {.op = op, .stream = {2, NULL}},
                                              .outer_dim = 1};
    EXPECT_OK(smla_cuda_backend.projection(&no_tokens, &error));
    const smla_split_kv_b_proj_params no_keys = {.call = {.stream = stream}, .value_dim = 1};
    forget_calls();
    EXPECT_OK(smla_cuda_backend.split_kv_b_proj(&no_keys, &error));
    EXPECT_EQ(count_calls("split_kv_b_proj"), 1);
    const smla_gather_params gather = {.num_reqs = 1};
    forget_calls();
    EXPECT_OK(smla_cuda_backend.check_gather(&gather, &error));
    EXPECT_CALLS("");
}

/* A launcher whose table has no kernel for what the check lets through: a format that its author
 * has not added there. */
static void
test_tables_without_a_kernel(void)
{
    const smla_stream stream = {.device_id = 1, .handle = &streams[1]};
    const smla_kv_view kv = {.num_pages = 1,
                             .block_size = 1,
                             .format = &smla_kv_formats[SMLA_ROW_BFLOAT16_512]};
    const smla_cache_write_params write = {.call = {.op = "concat_and_cache_mla",
                                                    .stream = stream,
                                                    .kv_format = kv.format},
                                           .num_tokens = 1,
                                           .kv = kv};
    const smla_gather_params gather = {.call = {.op = "gather_kv_cache",
                                                .stream = stream,
                                                .kv_format = kv.format},
                                       .num_reqs = 1,
                                       .kv = kv};
    const smla_dequantize_params dequantize = {
        .call = {.op = "dequantize_kv_cache", .stream = stream, .kv_format = kv.format}, .kv = kv};
    const smla_merge_params merge = {.call = {.op = "merge_attn_states", .stream = stream},
                                     .num_tokens = 1,
                                     .num_heads = 1};
    begin();
    launch_code = SMLA_NO_KERNEL;
    EXPECT_FAIL(smla_cuda_backend.concat_and_cache_mla(&write, &error), SMLA_ERROR_RUNTIME,
                "concat_and_cache_mla: no CUDA kernel serves caches of bfloat16 with 512 elements "
                "a token");
    EXPECT_FAIL(smla_cuda_backend.gather_kv_cache(&gather, &error), SMLA_ERROR_RUNTIME,
                "gather_kv_cache: no CUDA kernel serves caches of bfloat16 with 512 elements");
    EXPECT_FAIL(smla_cuda_backend.dequantize_kv_cache(&dequantize, &error), SMLA_ERROR_RUNTIME,
                "dequantize_kv_cache: no CUDA kernel serves caches of bfloat16 with 512 elements");
    EXPECT_FAIL(smla_cuda_backend.merge_attn_states(&merge, &error), SMLA_ERROR_RUNTIME,
                "merge_attn_states: no CUDA kernel serves these arrays");
    EXPECT_EQ(fake.current, 0);
    launch_code = cudaSuccess;
}

/* Both launches for each chunk of tokens; the first one that fails is the last. */
static void
test_chunks_of_lightning_indexer(void)
{
    float matrix[4];
    const smla_stream stream = {.device_id = 1, .handle = &streams[1]};
    const smla_lightning_params call = {
        .call = {.op = "lightning_indexer", .stream = stream},
        .logits = {.num_tokens = 5, .out = matrix},
        .top_k = {.num_tokens = 5, .logits = matrix},
        .chunk_tokens = 2,
    };
    begin();
    EXPECT_OK(smla_cuda_backend.lightning_indexer(&call, &error));
    forget_calls();
    EXPECT_OK(smla_cuda_backend.lightning_indexer(&call, &error));
    EXPECT_CALLS("cuCtxPushCurrent cudaStreamIsCapturing@1 cudaStreamGetDevice@1~ "
                 "indexer_logits@1 top_k_per_row@1 indexer_logits@1 top_k_per_row@1 "
                 "indexer_logits@1 top_k_per_row@1 "
                 "cuCtxPopCurrent@1 ");
    launch_code = cudaErrorUnknown;
    EXPECT_FAIL(smla_cuda_backend.lightning_indexer(&call, &error), SMLA_ERROR_RUNTIME,
                "lightning_indexer: cudaLaunchKernelExC failed: a text (code 999)");
    launch_code = cudaSuccess;
    EXPECT_EQ(count_calls("indexer_logits"), 1);
    EXPECT_EQ(count_calls("top_k_per_row"), 0);
}

/* A device that is current already may still be too old. */
static void
test_old_device(void)
{
    begin();
    fake.capability = 75;
    for (int i = 0; i < NUM_CALLS; i++) {
        EXPECT_FAIL(call_operator(i, (smla_stream){0, NULL}, 1), SMLA_ERROR_RUNTIME,
                    "must have compute capability 8.0 or newer, got 7.5 (cuda:0)");
        EXPECT_EQ(count_calls(launch_names[i]), 0);
    }
}

/* The functions of other files that the backend's table names. */
static void
test_backend_table(void)
{
    const smla_backend *const b = &smla_cuda_backend;
    EXPECT(strcmp(b->name, "cuda") == 0 && b->device_type == kDLCUDA);
    EXPECT(b->check_device == smla_cuda_check_device);
    EXPECT(b->plan_attention == smla_cuda_plan_attention);
    EXPECT(b->prefers_direct == smla_cuda_prefers_direct);
    EXPECT(b->attention_workspace_size == smla_cuda_attention_workspace_size);
    EXPECT(b->kernel_name == smla_cuda_kernel_name);
    EXPECT(b->kernels == smla_cuda_kernels);
    EXPECT(b->allocate == smla_cuda_allocate && b->release == smla_cuda_release);
    EXPECT(b->create_mirror == smla_cuda_create_mirror);
    EXPECT(b->destroy_mirror == smla_cuda_destroy_mirror);
    EXPECT(b->begin_write == smla_cuda_begin_write && b->end_write == smla_cuda_end_write);
    EXPECT(b->begin_use == smla_cuda_begin_use && b->end_use == smla_cuda_end_use);
    EXPECT(b->streams == &smla_cuda_stream_ops);
}

/* Operators with SPARSE_MLA_CHECK=1. */
static void
test_checked_operators(void)
{
    const smla_stream stream = {.device_id = 1, .handle = &streams[1]};
    begin();
    EXPECT_OK(call_operator(OP_sparse_attention, stream, 1));
    set_env("SPARSE_MLA_CHECK", "1");
    for (int i = 0; i < NUM_CALLS; i++) {
        const int num_reads = num_reads_of[i];
        char text[128];
        forget_calls();
        cpu_status = SMLA_OK;
        EXPECT_OK(call_operator(i, stream, 1));
        EXPECT_EQ(count_calls("copy to host"), num_reads);
        EXPECT_EQ(count_calls("cudaStreamSynchronize"), 2 + num_reads);
        EXPECT_EQ(count_calls(launch_names[i]), 1);
        const char *const end = strstr(fake.calls, launch_names[i]);
        EXPECT(end != NULL && strstr(end, "cudaStreamSynchronize@1 cuCtxPopCurrent@1 ") != NULL);
        EXPECT_EQ(num_device_arrays, 0);
        /* the CPU's check refuses the values */
        cpu_status = SMLA_ERROR_VALUE;
        forget_calls();
        if (num_reads > 0) {
            EXPECT_FAIL(call_operator(i, stream, 1), SMLA_ERROR_VALUE, "the CPU's");
        }
        EXPECT_EQ(count_calls(launch_names[i]), 0);
        EXPECT_EQ(fake.current, 0);
        cpu_status = SMLA_OK;
        /* errors of earlier work, of the copies, and of the call's own kernels */
        for (int n = 0; n < 2 + num_reads; n++) {
            forget_calls();
            snprintf(text, sizeof text, "%s: %s failed: a text (code 700)", call_names[i],
                     n == 0               ? "cudaStreamSynchronize, before the call,"
                     : n == 1 + num_reads ? "a kernel of this call"
                                          : "cudaStreamSynchronize");
            fail_call("cudaStreamSynchronize", n, cudaErrorIllegalAddress);
            EXPECT_FAIL(call_operator(i, stream, 1), SMLA_ERROR_RUNTIME, text);
            EXPECT_EQ(count_calls(launch_names[i]), n == 1 + num_reads);
            EXPECT_EQ(fake.current, 0);
        }
        for (int n = 0; n < num_reads; n++) {
            fail_call("copy to host", n, cudaErrorIllegalAddress);
            snprintf(text, sizeof text, "%s: cudaMemcpyAsync failed", call_names[i]);
            EXPECT_FAIL(call_operator(i, stream, 1), SMLA_ERROR_RUNTIME, text);
        }
        /* a failed launch is reported as such, and the stream is not waited for */
        launch_code = cudaErrorInvalidValue;
        forget_calls();
        EXPECT_FAIL(call_operator(i, stream, 1), SMLA_ERROR_RUNTIME, "(code 1)");
        EXPECT_EQ(count_calls("cudaStreamSynchronize"), 1 + num_reads);
        launch_code = cudaSuccess;
        streams[1].is_capturing = true;
        EXPECT_FAIL(call_operator(i, stream, 1), SMLA_ERROR_RUNTIME,
                    "SPARSE_MLA_CHECK must be unset while a CUDA graph is captured");
        streams[1].is_capturing = false;
    }
    fail_call("cudaStreamIsCapturing", 1, cudaErrorUnknown);
    EXPECT_FAIL(call_operator(OP_sparse_attention, stream, 1), SMLA_ERROR_RUNTIME,
                "cudaStreamIsCapturing failed");
    has_memory = false;
    EXPECT_FAIL(call_operator(OP_concat_and_cache_mla, stream, 1), SMLA_ERROR_MEMORY,
                "concat_and_cache_mla: SPARSE_MLA_CHECK must find 4 bytes for a copy of an array");
    has_memory = true;
    EXPECT_EQ(num_live, 0);
}

/* Arrays of any strides are copied with their values, and no more bytes than they span. */
static void
test_read_arrays(void)
{
    enum { R = 3, W = 4 };
    static const int32_t strides[] = {1, 2, -1, -3, 0};
    const smla_stream stream = {.device_id = 0, .handle = &streams[0]};
    begin();
    cpu_status = SMLA_OK;
    for (int s = 0; s < 5; s++) {
        /* Arrays are exactly the bytes that they span, so that ASan sees a read of one more. */
        const int64_t stride = strides[s];
        const int64_t reach = stride < 0 ? -stride : stride;
        const int64_t count = (R - 1) * reach + 1;
        array *const lens = ARRAY(int32, count);
        array *const starts = ARRAY(int32, count);
        int32_t *const at_lens = (int32_t *)lens->tensor.data + (stride < 0 ? count - 1 : 0);
        int32_t *const at_starts = (int32_t *)starts->tensor.data + (stride < 0 ? count - 1 : 0);
        const int64_t row = s == 3 ? -W * 2 : W * 2;
        const int64_t table_count = (R - 1) * W * 2 + (W - 1) * (stride == 0 ? 0 : 2) + 1;
        array *const table = ARRAY(int32, table_count);
        int32_t *const at_table = (int32_t *)table->tensor.data + (row < 0 ? (R - 1) * W * 2 : 0);
        int64_t sum = 0;
        for (int i = 0; i < R; i++) {
            for (int k = 0; k < W; k++) {
                at_table[i * row + k * (stride == 0 ? 0 : 2)] = 1 + i * 5 + (stride == 0 ? 0 : k);
            }
            at_lens[i * stride] = 7 + i;
            at_starts[i * stride] = 3 + i;
        }
        for (int i = 0; i < R; i++) {
            for (int k = 0; k < W; k++) {
                sum += at_table[i * row + k * (stride == 0 ? 0 : 2)];
            }
            sum += 1000 * (int64_t)at_lens[i * stride];
            sum += 1000000 * (int64_t)at_starts[i * stride];
            sum += 1000000000 * (int64_t)at_lens[i * stride];
            sum += 7 * (int64_t)at_starts[i * stride];
        }
        const smla_gather_params params = {.call = {.stream = stream},
                                           .num_reqs = R,
                                           .num_blocks = W,
                                           .block_table = at_table,
                                           .block_table_stride_req = row,
                                           .block_table_stride_block = stride == 0 ? 0 : 2,
                                           .seq_lens = at_lens,
                                           .seq_lens_stride = stride,
                                           .workspace_starts = at_starts,
                                           .workspace_starts_stride = stride,
                                           .seq_starts = at_lens,
                                           .seq_starts_stride = stride,
                                           .gather_lens = at_starts,
                                           .gather_lens_stride = stride};
        EXPECT_OK(smla_cuda_check_gather(&params, &error));
        EXPECT_EQ(seen_sum, sum);
        EXPECT(seen_gather.block_table != params.block_table);
        EXPECT(seen_gather.seq_lens != params.seq_lens);
        EXPECT(seen_gather.workspace_starts != params.workspace_starts);
        EXPECT(seen_gather.seq_starts != params.seq_starts);
        EXPECT(seen_gather.gather_lens != params.gather_lens);
        EXPECT_EQ((int64_t)asked_bytes, 4 * count);
    }
    /* Arrays that are absent are not copied. */
    const smla_gather_params none = {.call = {.stream = stream}, .num_blocks = W};
    seen_gather.seq_starts = device_zeros;
    seen_gather.block_table = device_zeros;
    EXPECT_OK(smla_cuda_check_gather(&none, &error));
    EXPECT(seen_gather.seq_starts == NULL && seen_gather.block_table == NULL);
    static const int32_t one_id[1] = {5};
    const smla_gather_params no_columns = {.call = {.stream = stream},
                                           .num_reqs = 1,
                                           .block_table = one_id};
    forget_calls();
    EXPECT_OK(smla_cuda_check_gather(&no_columns, &error));
    EXPECT_CALLS("");
    EXPECT(seen_gather.block_table == one_id);

    const smla_convert_params no_prefills = {.call = {.stream = stream},
                                             .num_tokens = 1,
                                             .req_id_per_token = one_id,
                                             .prefill_workspace_starts = one_id,
                                             .prefill_workspace_starts_stride = 1};
    EXPECT_OK(smla_cuda_check_convert(&no_prefills, &error));
    EXPECT_CALLS("copy to host cudaStreamSynchronize "); /* only the ids are copied */

    const smla_convert_params convert = {.call = {.stream = stream},
                                         .num_tokens = 2,
                                         .num_prefills = 3,
                                         .req_id_per_token = (const int32_t[]){1, 0, 2},
                                         .req_id_stride = 2,
                                         .prefill_request_ids = (const int32_t[]){4, 5},
                                         .prefill_request_ids_stride = 1,
                                         .prefill_workspace_starts =
                                             (const int32_t[]){6, 0, 0, 7, 0, 0, 8},
                                         .prefill_workspace_starts_stride = 3};
    EXPECT_OK(smla_cuda_check_convert(&convert, &error));
    EXPECT_EQ(seen_sum, 21009003);
    EXPECT(seen_convert.req_id_per_token != convert.req_id_per_token);
    EXPECT(seen_convert.prefill_request_ids != convert.prefill_request_ids);
    EXPECT(seen_convert.prefill_workspace_starts != convert.prefill_workspace_starts);
    for (int is_wide = 0; is_wide < 2; is_wide++) {
        static const int64_t wide[] = {1, 99, INT64_C(1) << 40};
        static const int32_t narrow[] = {1, 99, 3};
        const smla_cache_write_params write = {.call = {.stream = stream},
                                               .num_tokens = 2,
                                               .slot_mapping =
                                                   is_wide ? (const void *)wide : narrow,
                                               .slot_stride = 2,
                                               .slots_are_int64 = is_wide};
        EXPECT_OK(smla_cuda_check_cache_write(&write, &error));
        EXPECT_EQ(seen_sum, is_wide ? (INT64_C(1) << 40) + 1 : 4);
        EXPECT_EQ((int)asked_bytes, is_wide ? 24 : 12);
        EXPECT(seen_write.slot_mapping != write.slot_mapping);
        const smla_rope rope = {.positions = write.slot_mapping,
                                .positions_stride = 2,
                                .positions_are_int64 = is_wide,
                                .max_pos = 7};
        const smla_call call = {.op = "op", .stream = stream};
        EXPECT_OK(smla_cuda_check_positions(&call, &rope, "table", 2, &error));
        EXPECT_EQ(seen_sum, is_wide ? (INT64_C(1) << 40) + 1 : 4);
        EXPECT_EQ((int)asked_bytes, is_wide ? 24 : 12);
        EXPECT(seen_rope.positions != rope.positions && seen_rope.max_pos == 7);
    }
    EXPECT_EQ(num_live, 0);
}

/* The arrays of index lists, of which a checked call reads only some. */
static void
test_read_batches(void)
{
    const smla_stream stream = {.device_id = 0, .handle = &streams[0]};
    const smla_query_batch batch = {.num_reqs = 2,
                                    .query_start_loc = (const int32_t[]){1, 99, 3, 99, 5},
                                    .query_start_loc_stride = 2};
    begin();
    cpu_status = SMLA_OK;
    const smla_topk_slots_params topk = {.call = {.op = op, .stream = stream},
                                         .num_tokens = 2,
                                         .req_id_per_token = (const int32_t[]){4, 99, 3},
                                         .req_id_stride = 2,
                                         .is_valid = (const uint8_t[]){7, 255, 255, 1},
                                         .is_valid_stride = 3};
    EXPECT_OK(smla_cuda_check_global_topk(&topk, &error));
    EXPECT_EQ(seen_sum, 8007);
    EXPECT_EQ((int)asked_bytes, 4);
    EXPECT(seen_global_topk.req_id_per_token != topk.req_id_per_token);
    EXPECT(seen_global_topk.is_valid != topk.is_valid);
    smla_combine_topk_swa_params combine = {.call = {.stream = stream},
                                            .batch = batch,
                                            .gather_lens = (const int32_t[]){5, 8},
                                            .gather_lens_stride = 1};
    combine.batch.seq_lens = (const int32_t[]){6, 99, 99, 7};
    combine.batch.seq_lens_stride = 3;
    EXPECT_OK(smla_cuda_check_combine_topk_swa(&combine, &error));
    EXPECT_EQ(seen_sum, 131309);
    EXPECT_EQ((int)asked_bytes, 8);
    EXPECT(seen_combine.batch.query_start_loc != batch.query_start_loc);
    EXPECT(seen_combine.batch.seq_lens != combine.batch.seq_lens);
    EXPECT(seen_combine.gather_lens != combine.gather_lens);
    const smla_mixed_indices_params mixed = {.call = {.stream = stream},
                                             .num_tokens = 3,
                                             .num_decode_tokens = 2,
                                             .batch = batch,
                                             .req_id_per_token = (const int32_t[]){1, 2, 3},
                                             .req_id_stride = 1,
                                             .is_valid = (const uint8_t[]){1, 1},
                                             .is_valid_stride = 1};
    EXPECT_OK(smla_cuda_check_mixed_indices(&mixed, &error));
    EXPECT_EQ(seen_sum, 2006009);
    EXPECT_EQ((int)asked_bytes, 2);
    EXPECT(seen_mixed.batch.query_start_loc != batch.query_start_loc);
    EXPECT(seen_mixed.req_id_per_token != mixed.req_id_per_token);
    EXPECT(seen_mixed.is_valid != mixed.is_valid);
    EXPECT_EQ(num_live, 0);
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
    RUN(test_operators);
    RUN(test_tables_without_a_kernel);
    RUN(test_chunks_of_lightning_indexer);
    RUN(test_old_device);
    RUN(test_backend_table);
    RUN(test_checked_operators);
    RUN(test_read_arrays);
    RUN(test_read_batches);
    return report("test_cuda_device");
}
