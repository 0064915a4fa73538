/* cpu_backend.c: the table of the CPU backend. */
#include <stdlib.h>
#include <string.h>

#include "cpu/attention/mha.h"
#include "cpu/attention/mqa.h"
#include "cpu/cpu.h"
#include "cpu/isa.h"

enum { CACHE_LINE_BYTES = 64 };

static smla_status
check_device(const char *op, int32_t device_id, smla_error *error)
{
    (void)op, (void)device_id, (void)error; /* there is one CPU, and it works */
    return SMLA_OK;
}

static void *
allocate(int32_t device_id, int64_t bytes)
{
    (void)device_id;
    /* aligned_alloc wants a multiple of the alignment. Large blocks are committed page by page when
     * they are first touched, so an unused workspace costs only address space. */
    const size_t lines = ((size_t)bytes + CACHE_LINE_BYTES - 1) / CACHE_LINE_BYTES;
    return aligned_alloc(CACHE_LINE_BYTES, (lines > 0 ? lines : 1) * CACHE_LINE_BYTES);
}

static void *
allocate_zeros(int32_t device_id, int64_t bytes)
{
    void *const memory = allocate(device_id, bytes);
    return memory == NULL ? NULL : memset(memory, 0, (size_t)bytes);
}

static void
release(int32_t device_id, void *memory)
{
    (void)device_id;
    free(memory);
}

/* ---- Mirrors: host and device memory are one, and every call is over when it returns --------- */

static smla_mirror *
create_mirror(int32_t device_id, int64_t bytes)
{
    smla_mirror *mirror = malloc(sizeof *mirror);
    void *memory = allocate_zeros(device_id, bytes);
    if (mirror == NULL || memory == NULL) {
        free(mirror);
        free(memory);
        return NULL;
    }
    *mirror = (smla_mirror){.device = memory, .bytes = bytes};
    return mirror;
}

static void
destroy_mirror(smla_mirror *mirror)
{
    if (mirror != NULL) {
        free(mirror->device);
        free(mirror);
    }
}

/* All CPUs are one kind. */
static int32_t
find_capability(int32_t device_id)
{
    (void)device_id;
    return 0;
}

static smla_status
begin_write(const char *op, smla_mirror *mirror, smla_stream stream, void **host, smla_error *error)
{
    (void)op, (void)stream, (void)error;
    mirror->used_bytes = mirror->bytes;
    *host = mirror->device;
    return SMLA_OK;
}

static smla_status
need_no_order(const char *op, smla_mirror *mirror, smla_stream stream, smla_error *error)
{
    (void)op, (void)mirror, (void)stream, (void)error;
    return SMLA_OK;
}

static smla_status
attend(const smla_attention_params *params, smla_error *error)
{
    const smla_cpu_isa *isa = NULL;
    SMLA_TRY(smla_cpu_choose_isa(params->call.op, &isa, error));
    return !smla_has_lists(params) ? smla_attend_mha(params, isa, error)
                                   : smla_attend_mqa(params, isa, error);
}

/* A slot that follows another slot. */
#define FILL_SLOT(name, args_type, params_type, family) , .name = smla_cpu_##name

const smla_backend smla_cpu_backend = {
    .name = "cpu",
    .device_type = kDLCPU,
    .check_device = check_device,
    .capability = find_capability,
    .chunk_logits_bytes = SMLA_CPU_CHUNK_LOGITS_BYTES,
    .chunk_tokens = SMLA_CPU_CHUNK_TOKENS,
    .check_gather = smla_cpu_check_gather,
    .fill_step_lists = smla_cpu_fill_step_lists,
    .fill_paged_lists = smla_cpu_fill_paged_lists,
    .prefers_direct = smla_cpu_prefers_direct,
    .attention_workspace_size = smla_cpu_attention_workspace_size,
    .plan_attention = smla_cpu_plan_attention,
    .kernel_name = smla_cpu_kernel_name,
    .find_key_ranges = smla_cpu_find_key_ranges,
    .attend = attend,
    .projection = smla_cpu_projection,
    .kernels = smla_cpu_kernels,
    .allocate = allocate,
    .allocate_zeros = allocate_zeros,
    .release = release,
    .create_mirror = create_mirror,
    .destroy_mirror = destroy_mirror,
    .begin_write = begin_write,
    .end_write = need_no_order,
    .begin_use = need_no_order,
    .end_use = need_no_order SMLA_OPERATORS(FILL_SLOT),
};
