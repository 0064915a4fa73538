/* engine.c: creates a step with its persistent buffers, builds it for each batch, and destroys it.
 *
 * A build sends what the host knows in one copy. Then a plan may start kernels that write what
 * depends on values on the device. The plans are in plans/, the layers that read a step in layers/.
 */
#include "step/engine.h"

#include <stdalign.h>
#include <stdlib.h>
#include <string.h>

#include "core/args.h"
#include "core/entry.h"
#include "core/rule.h"
#include "step/plans.h"

const char smla_create_op[] = "MetadataBuilder";
const char smla_build_op[] = "MetadataBuilder.build";

enum { MAX_ARGS_BYTES = 256 }; /* the largest args of a build */

#define CHECK_ARGS(name, builder, config, args, metadata) \
    _Static_assert(sizeof(args) <= MAX_ARGS_BYTES, "room for the args of a build");
SMLA_STEP_PLANS(CHECK_ARGS)

/* ---- Device -------------------------------------------------------------------------------- */

smla_status
smla_require_step_device(const smla_step *s, const char *op, const char *name, DLDevice device,
                         smla_error *error)
{
    const smla_backend *backend;
    SMLA_TRY(smla_find_backend(op, device, &backend, error));
    return backend == s->backend && device.device_id == s->device.device_id
               ? SMLA_OK
               : smla_fail_value(error, op,
                                 "`%s` must be on the device of the config, got another one", name);
}

/* ---- Workspace ----------------------------------------------------------------------------- */

/* [pages, rows, columns], whose rows all lie the same distance apart, as [rows, columns]. Other
 * arrays stay as they are. */
static const DLTensor *
flatten_rows(smla_view *view, const DLTensor *tensor)
{
    int64_t num_rows;
    int64_t distance; /* the stride of pages whose rows follow each other */
    if (tensor->ndim != 3 || tensor->shape == NULL ||
        __builtin_mul_overflow(tensor->shape[1], smla_stride(tensor, 1), &distance) ||
        __builtin_mul_overflow(tensor->shape[0], tensor->shape[1], &num_rows) ||
        smla_stride(tensor, 0) != distance) {
        return tensor;
    }
    const int64_t shape[2] = {num_rows, tensor->shape[2]};
    smla_make_view(view, smla_data(tensor), tensor->dtype, tensor->device, 2, shape);
    view->strides[0] = smla_stride(tensor, 1);
    view->strides[1] = smla_stride(tensor, 2);
    return &view->tensor;
}

/* Takes a caller's workspace. */
static smla_status
adopt_workspace(smla_step *s, int which, const smla_workspace_rule *rule, smla_error *error)
{
    smla_view flat;
    const DLTensor *const tensor =
        rule->may_be_pages ? flatten_rows(&flat, rule->given) : rule->given;
    smla_checker c;
    smla_open_checker(&c, smla_create_op, error);
    SMLA_TRY(smla_require_2d(&c, rule->name, tensor, SMLA_DTYPE_BF16, rule->least, rule->columns,
                             SMLA_RULE_OUTPUT | SMLA_RULE_MORE_ROWS, rule->hint));
    SMLA_TRY(smla_require_step_device(s, smla_create_op, rule->name, c.device, error));
    const int64_t rows = rule->rows == SMLA_ANY ? smla_size(tensor, 0) : rule->rows;
    smla_slice_rows(&s->workspaces[which], tensor, 0, rows);
    return SMLA_OK;
}

static smla_status
take_workspace(smla_step *s, int which, const smla_workspace_rule *rule, smla_error *error)
{
    if (rule->given != NULL) {
        return adopt_workspace(s, which, rule, error);
    }
    const int64_t shape[2] = {rule->rows, rule->columns};
    const DLDataType bf16 = {.code = kDLBfloat, .bits = 16, .lanes = 1};
    uint16_t **const own = &s->own_workspaces[which];
    if (rule->rows > 0) {
        int64_t bytes;
        const bool overflows =
            __builtin_mul_overflow(rule->rows, rule->columns * (int64_t)sizeof **own, &bytes);
        *own = overflows ? NULL : s->backend->allocate(s->device.device_id, bytes);
        if (*own == NULL) {
            return s->plan->report_no_memory(s, error);
        }
    }
    smla_make_view(&s->workspaces[which], *own, bf16, s->device, 2, shape);
    return SMLA_OK;
}

static smla_status
take_workspaces(smla_step *s, smla_error *error)
{
    smla_workspace_rule rules[SMLA_MAX_WORKSPACES] = {{.given = NULL}};
    if (s->plan->fill != NULL) {
        SMLA_TRY(s->plan->find_workspaces(s, rules, error));
    }
    for (int i = 0; i < SMLA_MAX_WORKSPACES; i++) {
        SMLA_TRY(take_workspace(s, i, &rules[i], error));
    }
    return SMLA_OK;
}

int64_t
smla_step_workspace_bytes(const smla_step *s)
{
    int64_t bytes = 0;
    if (s == NULL) {
        return 0;
    }
    for (int i = 0; i < SMLA_MAX_WORKSPACES; i++) {
        const DLTensor *const rows = &s->workspaces[i].tensor;
        bytes += smla_size(rows, 0) * smla_size(rows, 1) * (int64_t)sizeof *s->own_workspaces[i];
    }
    return s->plan->count_other_bytes == NULL ? bytes : bytes + s->plan->count_other_bytes(s);
}

/* ---- Creating a step ----------------------------------------------------------------------- */

void
smla_cut_arena(const smla_arena *arena, int32_t *memory, void *arrays)
{
    for (int i = 0; i < arena->num_rows; i++) {
        memcpy((char *)arrays + arena->rows[i].field, &memory, sizeof(void *));
        memory += arena->rows[i].count;
    }
}

static smla_status
allocate_buffers(smla_step *s, smla_error *error)
{
    const smla_step_plan *const plan = s->plan;
    const smla_backend *const backend = s->backend;
    const int32_t device_id = s->device.device_id;
    s->max_num_chunks = s->limits.max_num_seqs;
    plan->list_arrays(s);
    const int64_t sent_bytes = smla_arena_bytes(&s->sent);
    const int64_t made_bytes = smla_arena_bytes(&s->made);
    const int64_t kept_bytes = smla_arena_bytes(&s->kept);
    if (sent_bytes < 0 || made_bytes < 0 || kept_bytes < 0) {
        return plan->report_no_memory(s, error);
    }
    SMLA_TRY(take_workspaces(s, error));
    s->scratch_bytes = plan->fill == NULL ? 0 : plan->find_scratch_bytes(s);
    s->mirror = backend->create_mirror(device_id, sent_bytes);
    s->lists = made_bytes == 0 ? NULL : backend->allocate_zeros(device_id, made_bytes);
    s->scratch = backend->allocate(device_id, s->scratch_bytes);
    s->host = kept_bytes == 0 ? NULL : malloc((size_t)kept_bytes);
    s->chunks = calloc((size_t)s->max_num_chunks, sizeof *s->chunks);
    s->next_chunks = calloc((size_t)s->max_num_chunks, sizeof *s->next_chunks);
    s->seq_lens = malloc((size_t)s->limits.max_num_seqs * sizeof *s->seq_lens);
    if (s->mirror == NULL || (s->lists == NULL && made_bytes > 0) || s->scratch == NULL ||
        (s->host == NULL && kept_bytes > 0) || s->chunks == NULL || s->next_chunks == NULL ||
        s->seq_lens == NULL) {
        return plan->report_no_memory(s, error);
    }
    smla_cut_arena(&s->sent, s->mirror->device, (char *)s + plan->sent);
    if (s->lists != NULL) {
        smla_cut_arena(&s->made, s->lists, (char *)s + plan->made);
    }
    if (s->host != NULL) {
        smla_cut_arena(&s->kept, s->host, (char *)s + plan->kept);
    }
    return SMLA_OK;
}

static smla_status
initialize(smla_step *s, const void *given, smla_error *error)
{
    const smla_step_plan *const plan = s->plan;
    void *const config = (char *)s + plan->config;
    SMLA_TRY(smla_read_args(smla_create_op, config, plan->config_bytes, given, error));
    SMLA_TRY(smla_complete_config(smla_create_op, plan->fields, plan->num_fields, config, error));
    SMLA_TRY(plan->check(s, error));
    SMLA_TRY(smla_find_backend(smla_create_op, s->device, &s->backend, error));
    return allocate_buffers(s, error);
}

smla_status
smla_create_step(const smla_step_plan *plan, const void *config, smla_step **step,
                 smla_error *error)
{
    smla_step *s = calloc(1, plan->step_bytes);
    if (s == NULL) {
        return smla_fail(error, SMLA_ERROR_MEMORY, "%s: a builder must fit in memory, got none",
                         smla_create_op);
    }
    s->plan = plan;
    const smla_fp_mode callers = smla_fp_change(SMLA_FP_EXACT);
    const smla_status status = initialize(s, config, error);
    smla_fp_change(callers);
    if (status != SMLA_OK) {
        smla_destroy_step(s);
        return status;
    }
    *step = s;
    return SMLA_OK;
}

void
smla_destroy_step(smla_step *s)
{
    if (s == NULL) {
        return;
    }
    if (s->backend != NULL) {
        for (int i = 0; i < SMLA_MAX_WORKSPACES; i++) {
            s->backend->release(s->device.device_id, s->own_workspaces[i]);
        }
        s->backend->release(s->device.device_id, s->lists);
        s->backend->release(s->device.device_id, s->scratch);
        s->backend->destroy_mirror(s->mirror);
    }
    free(s->host);
    free(s->chunks);
    free(s->next_chunks);
    free(s->seq_lens);
    free(s);
}

/* ---- Building a step ----------------------------------------------------------------------- */

smla_status
smla_cut_chunks(const smla_step *s, const smla_prefills *prefills, smla_step_facts *facts,
                smla_error *error)
{
    smla_chunk_list list = {.chunks = s->next_chunks};
    SMLA_TRY(smla_cut_prefills(smla_build_op, prefills, &list, error));
    facts->num_chunks = list.num_chunks;
    facts->num_parts = list.num_parts;
    return SMLA_OK;
}

/* Checks a batch, and finds the facts of its step. */
static smla_status
plan_step(const smla_step *s, smla_batch *batch, const void *args, smla_step_facts *facts,
          smla_error *error)
{
    SMLA_TRY(smla_check_batch(smla_build_op, &s->limits, batch, error));
    smla_hide_idle_tokens(batch, s->seq_lens);
    SMLA_TRY(s->plan->check_args(s, batch, args, error));
    facts->split = smla_split_batch(&s->limits, batch);
    if (smla_step_modes[s->path].is_split) {
        SMLA_TRY(smla_check_batch_order(smla_build_op, &s->limits, batch, error));
    }
    SMLA_TRY(s->plan->cut_chunks(s, batch, facts, error));
    facts->num_first_tokens = facts->num_actual_tokens;
    if (smla_step_modes[facts->path].is_split) {
        facts->num_first_tokens = facts->split.num_decode_tokens;
        for (int64_t req = 0; req < facts->split.num_decodes; req++) {
            const int64_t len = smla_query_len(batch->query_start_loc, req);
            facts->decode_query_len = len > facts->decode_query_len ? len : facts->decode_query_len;
        }
    }
    return SMLA_OK;
}

/* Starts the plan's kernels behind the copy of the step. Layers on other streams wait for this use
 * of the mirror, and so for the lists. */
static smla_status
fill_lists(const smla_step *s, const void *args, smla_stream stream, smla_error *error)
{
    if (s->plan->fill_lists == NULL) {
        return SMLA_OK;
    }
    SMLA_TRY(s->backend->begin_use(smla_build_op, s->mirror, stream, error));
    const smla_status status = s->plan->fill_lists(s, args, stream, error);
    const smla_status ended =
        s->backend->end_use(smla_build_op, s->mirror, stream, status == SMLA_OK ? error : NULL);
    return status == SMLA_OK ? ended : status;
}

static smla_status
run_build(smla_step *s, const void *given, smla_error *error)
{
    alignas(max_align_t) unsigned char args[MAX_ARGS_BYTES];
    void *memory = NULL;
    SMLA_TRY(smla_require_pointer(smla_build_op, "builder", s, error));
    SMLA_TRY(smla_read_args(smla_build_op, args, s->plan->args_bytes, given, error));
    smla_batch batch = s->plan->read_batch(args);
    const smla_stream stream = {.device_id = s->device.device_id, .handle = batch.stream};
    smla_step_facts facts = {.path = s->path,
                             .num_reqs = batch.num_reqs,
                             .num_actual_tokens = batch.num_actual_tokens};
    const bool sends = s->plan->fill != NULL;
    SMLA_TRY(sends ? plan_step(s, &batch, args, &facts, error)
                   : s->plan->check_args(s, &batch, args, error));
    if (sends) {
        SMLA_TRY(s->backend->begin_write(smla_build_op, s->mirror, stream, &memory, error));
    }
    /* From here on the last step is overwritten. */
    s->is_built = false;
    s->facts = facts;
    smla_prefill_chunk *const last_chunks = s->chunks;
    s->chunks = s->next_chunks;
    s->next_chunks = last_chunks;
    if (sends) {
        s->plan->fill(s, &batch, memory);
        SMLA_TRY(s->backend->end_write(smla_build_op, s->mirror, stream, error));
    }
    SMLA_TRY(fill_lists(s, args, stream, error));
    s->plan->commit(s, args);
    s->is_built = true;
    if (smla_is_logging) {
        smla_log_device(s->device);
        smla_log_text(" requests %lld,", (long long)facts.num_reqs);
        if (sends) {
            smla_log_text(" tokens %lld, path %s, chunks %lld,", (long long)facts.num_actual_tokens,
                          smla_path_name(facts.path), (long long)facts.num_chunks);
        }
    }
    return SMLA_OK;
}

smla_status
smla_build_step(smla_step *s, const void *args, smla_error *error)
{
    smla_entry entry;
    smla_enter(&entry, smla_build_op);
    return smla_leave(&entry, run_build(s, args, error));
}
