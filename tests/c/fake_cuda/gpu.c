/* gpu.c: a GPU made of plain memory, for Python's tests of what the extension does with streams,
 * events and arrays on a device. The host files of csrc/cuda run unchanged, on runtime.h. Kernels
 * are those of the CPU backend, and are done when their launch returns. buildtools/graph.py makes
 * an extension of it, which tests/kit/fake_gpu.py loads. Python calls the functions at the end.
 */
#include "core/params_all.h"
#include "cuda/attention/table/kernels.h"
#include "cuda/attention/table/wide_rows.h"

static cudaError_t write_launch(smla_stream stream);

/* Replaces the function of projection_cublas.c. It stands in front of testing.h, which has a
 * global `error`. */
smla_status
smla_cuda_projection(const smla_projection_params *params, smla_error *error)
{
    SMLA_TRY(smla_cuda_status(params->call.op, "launch", write_launch(params->call.stream), error));
    return smla_cpu_backend.projection(params, error);
}

#include "each_launcher.h"
#include "runtime.h"
#include "shape.h"

/* ---- Launchers ----------------------------------------------------------------------------- */

static void *launch_stream; /* the stream of the last launch */
static int launch_device;

static cudaError_t
write_launch(smla_stream stream)
{
    launch_stream = stream.handle;
    launch_device = stream.device_id;
    return answer("launch");
}

/* A launcher whose kernel is the operator of the CPU backend. */
#define LAUNCHER(name, args_type, params_type, family)                                             \
    cudaError_t smla_cuda_launch_##name(const params_type *params, const smla_cuda_device *device) \
    {                                                                                              \
        (void)device;                                                                              \
        const cudaError_t code = write_launch(params->call.stream);                                \
        EXPECT(code != cudaSuccess || smla_cpu_backend.name(params, NULL) == SMLA_OK);             \
        return code;                                                                               \
    }

SMLA_LAUNCHED_OPERATORS(LAUNCHER)
LAUNCHER(fill_step_lists, smla_v4_build_args, smla_step_lists_params, step)
LAUNCHER(fill_paged_lists, smla_paged_build_args, smla_paged_step_params, paged_step)

cudaError_t
smla_cuda_launch_key_ranges(const smla_key_ranges_params *params, const smla_cuda_device *device)
{
    (void)device;
    const cudaError_t code = write_launch(params->call.stream);
    EXPECT(code != cudaSuccess || smla_cpu_backend.find_key_ranges(params, NULL) == SMLA_OK);
    return code;
}

static cudaError_t
attend_mha(const smla_attention_params *params)
{
    const cudaError_t code = write_launch(params->call.stream);
    EXPECT(code != cudaSuccess || smla_cpu_backend.attend(params, NULL) == SMLA_OK);
    return code;
}

#define ATTEND_MHA(name)                                                \
    cudaError_t smla_attend_##name(const smla_attention_params *params, \
                                   const smla_attention_start *start)   \
    {                                                                   \
        (void)start;                                                    \
        return attend_mha(params);                                      \
    }

ATTEND_MHA(sm90_mha)
ATTEND_MHA(sm80_mha)
ATTEND_MHA(sm90_paged)
ATTEND_MHA(sm80_paged)

cudaError_t
smla_cuda_launch_projection_e4m3(const smla_projection_params *params)
{
    const cudaError_t code = write_launch(params->call.stream);
    EXPECT(code != cudaSuccess || smla_cpu_backend.projection(params, NULL) == SMLA_OK);
    return code;
}

/* ---- Attention ----------------------------------------------------------------------------- */

/* Maps a list's positions to slots in new memory. */
static int32_t *
map_positions(smla_key_list *list, int64_t num_tokens)
{
    int32_t *slots = calloc((size_t)(num_tokens * list->topk + 1), sizeof *slots);
    const smla_convert_params params = {
        .num_tokens = num_tokens,
        .topk = list->topk,
        .num_reqs = list->map.num_reqs,
        .num_blocks = list->map.num_blocks,
        .block_size = list->kv.block_size,
        .req_id_per_token = list->map.req_id_per_token,
        .req_id_stride = 1,
        .block_table = list->map.block_table,
        .block_table_stride_req = list->map.block_table_stride_req,
        .block_table_stride_block = list->map.block_table_stride_block,
        .topk_indices = list->indices,
        .topk_indices_stride_token = list->indices_stride_token,
        .out = slots,
        .out_stride_token = list->topk,
    };
    EXPECT_EQ(smla_cpu_backend.convert_req_index_to_global_index(&params, NULL), SMLA_OK);
    list->indices = slots;
    list->indices_stride_token = list->topk;
    list->map.block_table = NULL;
    return slots;
}

/* Writes out and lse at once. It allocates its scratch, because the call's workspace has the size
 * that CUDA's kernels need. */
static cudaError_t
attend(const smla_attention_params *params, smla_attention_launcher *launcher)
{
    const smla_attention_kernel *kernel = smla_attention_kernels;
    while (kernel->launch != launcher && kernel->launch_tiles != launcher) {
        kernel++;
    }
    const smla_attention_shape shape = shape_of(params);
    EXPECT((smla_join_formats(shape.formats[0], shape.formats[1]) & ~kernel->formats) == 0);
    const cudaError_t code = write_launch(params->call.stream);
    if (code != cudaSuccess) {
        return code;
    }
    smla_attention_params p = *params;
    const bool has_positions =
        p.keys.lists[0].indices != NULL && p.keys.lists[0].map.block_table != NULL;
    int32_t *slots = has_positions ? map_positions(&p.keys.lists[0], p.queries.num_tokens) : NULL;
    smla_cpu_backend.plan_attention(&shape, &p.plan);
    p.workspace.bytes = p.plan.workspace_bytes;
    p.workspace.memory = smla_cpu_backend.allocate(0, p.workspace.bytes);
    EXPECT_EQ(smla_cpu_backend.attend(&p, NULL), SMLA_OK);
    smla_cpu_backend.release(0, p.workspace.memory);
    free(slots);
    return cudaSuccess;
}

#define ATTEND(name)                                                    \
    cudaError_t smla_attend_##name(const smla_attention_params *params, \
                                   const smla_attention_start *start)   \
    {                                                                   \
        (void)start;                                                    \
        return attend(params, smla_attend_##name);                      \
    }

EACH_LAUNCHER(ATTEND)

/* Fills the memory of the widened rows, and reads the caches. */
cudaError_t
smla_attend_sm90_widened_64(const smla_attention_params *params, const smla_attention_start *start)
{
    const smla_key_lists *const keys = &params->keys;
    int64_t num_keys = 0;
    for (int i = 0; i < keys->num_lists; i++) {
        num_keys += smla_kv_num_slots(&keys->lists[i].kv);
    }
    memset(start->wide, 0xA5, (size_t)((num_keys + 1) * SMLA_WIDE_ROW_BYTES));
    return attend(params, keys->lists[0].kv.format->number == SMLA_ROW_FP8_V4
                              ? smla_attend_sm90_v4_64
                              : smla_attend_sm90_fp8_64);
}

cudaError_t
smla_cuda_launch_combine(const smla_attention_params *params, const smla_attention_kernel *kernel,
                         smla_cuda_deferred *deferred)
{
    (void)params;
    (void)kernel;
    EXPECT(deferred == NULL); /* the kernel above started at once */
    return cudaSuccess;
}

/* ---- What Python calls --------------------------------------------------------------------- */

#define PYTHON_API __attribute__((visibility("default")))

PYTHON_API void fake_gpu_reset(void);
PYTHON_API const char *fake_gpu_calls(void);
PYTHON_API void fake_gpu_forget_calls(void);
PYTHON_API void fake_gpu_fail(const char *call, int num_good, int code, bool keeps);
PYTHON_API const char *fake_gpu_failed(void);
PYTHON_API void fake_gpu_set_busy(bool is_busy);
PYTHON_API void fake_gpu_pin(const void *memory, int64_t bytes, void *reached_at);
PYTHON_API void fake_gpu_map(const void *memory, int64_t bytes, int device_id);
PYTHON_API void fake_gpu_finish(void);
PYTHON_API void *fake_gpu_new_stream(int device_id);
PYTHON_API void fake_gpu_capture(void *stream, bool is_capturing);
PYTHON_API void *fake_gpu_followed(void *stream);
PYTHON_API void *fake_gpu_launch_stream(void);
PYTHON_API int fake_gpu_launch_device(void);
PYTHON_API int fake_gpu_num_events(void);
PYTHON_API int fake_gpu_num_memory(void);
PYTHON_API int fake_gpu_num_host(void);
PYTHON_API int fake_gpu_num_streams(void);
PYTHON_API int fake_gpu_current(void);
PYTHON_API bool fake_gpu_is_relaxed(void);
PYTHON_API int fake_gpu_num_failures(void);
PYTHON_API int fake_gpu_refuse(DLTensor *prototype, DLManagedTensorVersioned **out, void *context,
                               void (*set_error)(void *context, const char *kind,
                                                 const char *message));
PYTHON_API int
fake_gpu_refuse_silently(DLTensor *prototype, DLManagedTensorVersioned **out, void *context,
                         void (*set_error)(void *context, const char *kind, const char *message));

/* Two idle H200s and an A100. Live memory and events stay alive, because the extension frees them
 * later. */
void
fake_gpu_reset(void)
{
    static bool is_started;
    if (!is_started) {
        reset_fake();
        fake.num_devices = 3;
        fake.older = 2;
        is_started = true;
    }
    fake.num_good = -1;
    fake.is_busy = false;
    fake.pinned_bytes = 0;
    fake.mapped_bytes = 0;
    fake_default_stream.is_capturing = false;
    fake_default_stream.follows = NULL;
    launch_stream = NULL;
    launch_device = -1;
    fake_gpu_finish();
    forget_calls();
}

/* Names of the runtime's calls, each followed by a space. */
const char *
fake_gpu_calls(void)
{
    return fake.calls;
}

void
fake_gpu_forget_calls(void)
{
    forget_calls();
}

/* A call fails after num_good good ones; with `keeps` later ones, too. `call` is not copied. */
void
fake_gpu_fail(const char *call, int num_good, int code, bool keeps)
{
    fail_call(call, num_good, code);
    fake.keeps_failing = keeps;
}

/* The call that has failed since fake_gpu_fail; NULL if none has. */
const char *
fake_gpu_failed(void)
{
    return fake.failed;
}

/* Sets whether events that are recorded from now on are pending. */
void
fake_gpu_set_busy(bool is_busy)
{
    fake.is_busy = is_busy;
}

/* Pins host memory, and no other. The device has it at another address. */
void
fake_gpu_pin(const void *memory, int64_t bytes, void *reached_at)
{
    fake.pinned = memory;
    fake.pinned_bytes = bytes;
    fake.reached_at = reached_at;
}

/* All devices can read this memory of one device, and none another's other memory. */
void
fake_gpu_map(const void *memory, int64_t bytes, int device_id)
{
    fake.mapped = memory;
    fake.mapped_bytes = bytes;
    fake.mapped_device = device_id;
}

void
fake_gpu_finish(void)
{
    for (int i = 0; i < FAKE_EVENTS; i++) {
        if (fake.events[i] != NULL) {
            fake.events[i]->is_pending = false;
        }
    }
}

/* The stream is never freed. */
void *
fake_gpu_new_stream(int device_id)
{
    struct CUstream_st *stream = calloc(1, sizeof *stream);
    stream->id = ++fake.num_ids;
    stream->device_id = device_id;
    stream->context = &fake_contexts[device_id];
    return stream;
}

void
fake_gpu_capture(void *stream, bool is_capturing)
{
    find_fake_stream(stream)->is_capturing = is_capturing;
}

/* The stream of the event that this stream was last told to wait for; NULL is none, and 1 is the
 * legacy stream. */
void *
fake_gpu_followed(void *stream)
{
    const struct CUstream_st *follows = find_fake_stream(stream)->follows;
    return follows == &fake_default_stream ? cudaStreamLegacy : (void *)follows;
}

void *
fake_gpu_launch_stream(void)
{
    return launch_stream;
}

int
fake_gpu_launch_device(void)
{
    return launch_device;
}

int
fake_gpu_num_events(void)
{
    return fake.num_events;
}

int
fake_gpu_num_memory(void)
{
    return fake.num_memory;
}

/* Pinned memory that is alive. */
int
fake_gpu_num_host(void)
{
    return fake.num_host;
}

int
fake_gpu_num_streams(void)
{
    return fake.num_streams;
}

/* The current device. */
int
fake_gpu_current(void)
{
    return fake.current;
}

/* Whether captures are relaxed in this thread. */
bool
fake_gpu_is_relaxed(void)
{
    return fake_mode == cudaStreamCaptureModeRelaxed;
}

/* How many expectations of runtime.h and of this file were not met; each is printed. */
int
fake_gpu_num_failures(void)
{
    return failures;
}

/* Allocators of an exchange API that fail. */
int
fake_gpu_refuse(DLTensor *prototype, DLManagedTensorVersioned **out, void *context,
                void (*set_error)(void *context, const char *kind, const char *message))
{
    (void)prototype;
    (void)out;
    set_error(context, "MemoryError", "all is taken");
    return -1;
}

int
fake_gpu_refuse_silently(DLTensor *prototype, DLManagedTensorVersioned **out, void *context,
                         void (*set_error)(void *context, const char *kind, const char *message))
{
    (void)prototype;
    (void)out;
    (void)context;
    (void)set_error;
    return -1;
}
