/* plan_paged_build.c: a build of a paged step: checks the arrays of a batch, finds the sizes that
 * the caller sees, and starts the kernel that writes the arrays.
 *
 * Where the host can read the arrays, every value is checked. Elsewhere the host knows maxima, and
 * the kernel cuts lengths to what there is room for.
 */
#include "ops/check.h"
#include "step/plans/plan_paged.h"

static const char op[] = "MetadataBuilder.build";

/* ---- Lengths on the host ------------------------------------------------------------------- */

/* Lengths of the requests as the host knows them: the array, if it can be read, and maxima. */
typedef struct host_lens {
    const char *name;
    const int32_t *values; /* NULL: on a device */
    int64_t stride;
    const int32_t *bounds; /* NULL: not given */
    int64_t num_reqs;      /* the requests behind them are padding */
} host_lens;

static host_lens
lens_of(const smla_paged_build_args *args, const char *name, const DLTensor *tensor,
        const int32_t *bounds)
{
    const bool is_readable =
        tensor != NULL && smla_normal_device(tensor->device).device_type == kDLCPU;
    return (host_lens){name, is_readable ? smla_data(tensor) : NULL, smla_stride(tensor, 0),
                       args->is_fixed ? NULL : bounds, args->num_reqs - args->num_padding_reqs};
}

static host_lens
seqs_of(const smla_paged_build_args *args)
{
    return lens_of(args, "seq_lens", args->seq_lens, args->seq_lens_cpu);
}

static host_lens
extends_of(const smla_paged_build_args *args)
{
    return lens_of(args, "extend_seq_lens", args->extend_seq_lens, args->extend_seq_lens_cpu);
}

static host_lens
encoders_of(const smla_paged_build_args *args)
{
    return lens_of(args, "encoder_lens", args->encoder_lens, args->encoder_lens_cpu);
}

/* All of them. */
typedef struct known_lens {
    host_lens seqs;
    host_lens extends;
    host_lens encoders;
} known_lens;

static smla_int_vector
ints_of(const DLTensor *tensor)
{
    return (smla_int_vector){smla_data(tensor), smla_stride(tensor, 0),
                             tensor != NULL && smla_dtype(tensor) == SMLA_DTYPE_INT64};
}

/* A length that the host can read, else the number that it may be at most; 0 for none. */
static int64_t
known_at(const host_lens *lens, int64_t req)
{
    const int64_t len = req >= lens->num_reqs  ? 0
                        : lens->values != NULL ? lens->values[req * lens->stride]
                        : lens->bounds != NULL ? lens->bounds[req]
                                               : 0;
    return len > 0 ? len : 0;
}

/* The number that a length may be at most. */
static int64_t
bound_at(const host_lens *lens, int64_t req)
{
    const int64_t len = known_at(lens, req);
    return lens->bounds != NULL && lens->bounds[req] > len ? lens->bounds[req] : len;
}

/* ---- The mode ------------------------------------------------------------------------------ */

static smla_paged_batch
find_mode(const smla_paged_builder *b, const smla_paged_build_args *args)
{
    const smla_paged_config *const config = &b->config;
    const int number = smla_find_paged_mode(args->mode, config->topk > 1);
    const smla_paged_mode *const mode = &smla_paged_modes[number];
    return (smla_paged_batch){
        .mode = number,
        .num_steps = !mode->is_draft || args->num_steps == 0 ? 1 : args->num_steps,
        .query_len = smla_paged_number(config, mode->query_len, 0),
        .added = smla_paged_number(config, mode->added, args->spec_step),
        .rows_per_req = smla_paged_number(config, mode->rows, 0),
    };
}

smla_paged_batch
smla_paged_find_batch(const smla_paged_builder *b, const smla_paged_build_args *args)
{
    const int64_t page_size = b->config.page_size;
    const host_lens seqs = seqs_of(args), extends = extends_of(args), encoders = encoders_of(args);
    smla_paged_batch batch = find_mode(b, args);
    int64_t widest = 0; /* tokens of the tables, in the last step */
    if (args->is_fixed) {
        batch.num_tokens = args->num_tokens;
        batch.max_query_len = args->num_reqs == 0 ? 0 : args->num_tokens / args->num_reqs;
        batch.max_keys = b->table_width * page_size;
        batch.max_encoder_len = b->config.is_encoder_decoder ? b->config.max_context_len : 0;
        batch.table_columns = b->table_width;
        return batch;
    }
    batch.max_query_len = batch.query_len;
    batch.num_tokens = args->num_reqs * batch.query_len;
    for (int64_t req = 0; req < args->num_reqs; req++) {
        const int64_t seq_len = bound_at(&seqs, req);
        const int64_t encoder_len = seq_len == 0 ? 0 : bound_at(&encoders, req);
        const int64_t keys = seq_len + (encoder_len == 0 ? 0 : encoder_len % page_size);
        /* Where a length is an upper bound, the remainder may be any. */
        const int64_t most_pad =
            encoders.bounds == NULL ? keys - seq_len : smla_least_of(encoder_len, page_size - 1);
        batch.max_keys = keys > batch.max_keys ? keys : batch.max_keys;
        widest = seq_len + most_pad > widest ? seq_len + most_pad : widest;
        batch.max_encoder_len =
            encoder_len > batch.max_encoder_len ? encoder_len : batch.max_encoder_len;
        if (batch.query_len == 0) {
            const host_lens *const news = args->extend_seq_lens == NULL ? &seqs : &extends;
            const int64_t len = seq_len == 0 ? 0 : bound_at(news, req);
            batch.num_tokens += known_at(&seqs, req) == 0 ? 0 : known_at(news, req);
            batch.max_query_len = len > batch.max_query_len ? len : batch.max_query_len;
        }
    }
    batch.max_encoder_len = smla_least_of(batch.max_encoder_len, b->config.max_context_len);
    batch.max_keys += batch.added;
    batch.table_columns =
        smla_least_of((widest + batch.added + (batch.rows_per_req > 0 ? 0 : batch.num_steps - 1) +
                       page_size - 1) /
                          page_size,
                      b->table_width);
    return batch;
}

/* ---- Checks -------------------------------------------------------------------------------- */

smla_batch
smla_paged_read_batch(const void *args)
{
    const smla_paged_build_args *const a = args;
    return (smla_batch){.num_reqs = a->num_reqs, .stream = a->stream};
}

static smla_status
check_mode(const smla_paged_builder *b, const smla_paged_build_args *args, smla_error *error)
{
    const smla_paged_config *const config = &b->config;
    const int number = smla_find_paged_mode(args->mode, config->topk > 1);
    if (number < 0) {
        return smla_fail_value(error, op, "`mode` must be a forward mode, got %d", args->mode);
    }
    const smla_paged_mode *const mode = &smla_paged_modes[number];
    if (!smla_paged_has_mode(config, number)) {
        return mode->is_draft
                   ? smla_fail_value(error, op,
                                     "`spec_step` must be None without speculative_num_steps, got "
                                     "%lld",
                                     (long long)args->spec_step)
                   : smla_fail_value(
                         error, op, "`mode` must be one that needs no num_draft_tokens, got \"%s\"",
                         mode->name);
    }
    if (args->is_fixed && !mode->may_be_fixed) {
        return smla_fail_value(
            error, op, "`mode` must be one whose query tokens are fixed in a capture, got \"%s\"",
            mode->name);
    }
    if (mode->is_draft) {
        const int64_t last = config->speculative_num_steps - 1;
        SMLA_TRY(smla_require_count(op, "spec_step", args->spec_step, 0, last, error));
        SMLA_TRY(smla_require_count(op, "num_steps", args->num_steps, 0, last + 1 - args->spec_step,
                                    error));
    }
    return smla_require_count(op, "seq_lens", args->num_reqs, 0, config->max_bs, error);
}

/* Checks that an array is there if and only if the config or the mode wants one. */
static smla_status
check_presence(const char *name, const DLTensor *tensor, bool is_wanted, bool may_be,
               const char *why, smla_error *error)
{
    if (tensor == NULL ? !is_wanted : may_be) {
        return SMLA_OK;
    }
    return smla_fail_value(error, op, "`%s` must be %s %s, got %s", name,
                           tensor == NULL ? "given" : "None", why,
                           tensor == NULL ? "None" : "an array");
}

static smla_status
check_arrays(const smla_paged_builder *b, const smla_paged_build_args *args, smla_error *error)
{
    const smla_paged_config *const config = &b->config;
    const smla_paged_batch batch = find_mode(b, args);
    const unsigned ints = SMLA_DTYPE_INT64 | SMLA_DTYPE_INT32;
    const unsigned any_stride = SMLA_RULE_OPTIONAL | SMLA_RULE_ANY_LAST_STRIDE;
    const bool is_ragged = batch.query_len == 0;
    const bool has_mask = batch.mode == SMLA_PAGED_VERIFY_TREE;
    const bool needs_loc = batch.mode == SMLA_PAGED_DRAFT_TREE;
    smla_checker c;
    smla_open_checker(&c, op, error);
    SMLA_TRY(smla_require_vector(&c, "seq_lens", args->seq_lens, args->num_reqs, 0,
                                 "a length per request"));
    SMLA_TRY(smla_require_step_device(&b->step, op, "seq_lens", c.device, error));
    SMLA_TRY(smla_require_1d(&c, "req_pool_indices", args->req_pool_indices, ints, args->num_reqs,
                             SMLA_RULE_ANY_LAST_STRIDE, "a row of req_to_token per request"));
    SMLA_TRY(smla_require_2d(&c, "req_to_token", args->req_to_token, SMLA_DTYPE_INT32, SMLA_ANY,
                             SMLA_ANY, 0, NULL));
    SMLA_TRY(smla_require_1d(&c, "full_to_swa_index_mapping", args->full_to_swa_index_mapping,
                             SMLA_DTYPE_INT32, SMLA_ANY, any_stride, NULL));
    SMLA_TRY(smla_require_1d(&c, "extend_seq_lens", args->extend_seq_lens, SMLA_DTYPE_INT32,
                             args->num_reqs, any_stride, "a length per request"));
    SMLA_TRY(smla_require_1d(&c, "out_cache_loc", args->out_cache_loc, ints, SMLA_ANY, any_stride,
                             NULL));
    SMLA_TRY(smla_require_1d(&c, "custom_mask", args->custom_mask,
                             SMLA_DTYPE_BOOL | SMLA_DTYPE_UINT8, SMLA_ANY, any_stride, NULL));
    SMLA_TRY(smla_require_1d(&c, "encoder_lens", args->encoder_lens, SMLA_DTYPE_INT32,
                             args->num_reqs, any_stride, "a length per request"));
    SMLA_TRY(check_presence("full_to_swa_index_mapping", args->full_to_swa_index_mapping,
                            config->has_window_pool, config->has_window_pool,
                            "as has_window_pool of the config says", error));
    SMLA_TRY(check_presence("encoder_lens", args->encoder_lens, config->is_encoder_decoder,
                            config->is_encoder_decoder, "as is_encoder_decoder of the config says",
                            error));
    SMLA_TRY(check_presence("extend_seq_lens", args->extend_seq_lens,
                            batch.mode == SMLA_PAGED_DRAFT_EXTEND, is_ragged, "in this mode",
                            error));
    SMLA_TRY(check_presence("custom_mask", args->custom_mask, has_mask, true, "to verify a tree",
                            error));
    return check_presence("out_cache_loc", args->out_cache_loc, needs_loc, true,
                          "in a step of a tree's draft", error);
}

/* On a device, tables and launches are sized by lengths of the host. */
static smla_status
check_bounds(const smla_paged_builder *b, const smla_paged_build_args *args, smla_error *error)
{
    const struct {
        const char *name;
        bool is_missing;
    } bounds[] = {
        {"seq_lens_cpu", args->seq_lens_cpu == NULL},
        {"extend_seq_lens_cpu", args->extend_seq_lens_cpu == NULL && args->extend_seq_lens != NULL},
        {"encoder_lens_cpu", args->encoder_lens_cpu == NULL && args->encoder_lens != NULL},
    };
    const bool are_needed = b->step.device.device_type != kDLCPU && !args->is_fixed;
    for (int i = 0; are_needed && i < 3; i++) {
        if (bounds[i].is_missing) {
            return smla_fail_value(error, op, "`%s` must be given for device arrays, got None",
                                   bounds[i].name);
        }
    }
    return SMLA_OK;
}

/* Checks the lengths of a request, as far as the host knows them. */
static smla_status
check_request(const smla_paged_builder *b, const smla_paged_build_args *args,
              const smla_paged_batch *batch, const known_lens *lens, int64_t req, smla_error *error)
{
    const smla_paged_config *const config = &b->config;
    const host_lens seqs = lens->seqs, extends = lens->extends, encoders = lens->encoders;
    const int64_t seq_len = known_at(&seqs, req);
    const int64_t encoder_len = known_at(&encoders, req);
    if (seq_len == 0) {
        return SMLA_OK;
    }
    if (seq_len + encoder_len > config->max_context_len) {
        return smla_fail_value(error, op,
                               "`%s` must make at most max_context_len = %lld tokens with those of "
                               "an encoder, got %lld at request %lld",
                               seqs.name, (long long)config->max_context_len,
                               (long long)(seq_len + encoder_len), (long long)req);
    }
    const int64_t last = batch->mode == SMLA_PAGED_VERIFY_TREE ? config->num_draft_tokens
                         : batch->rows_per_req > 0 ? 0
                                                   : batch->added + batch->num_steps - 1;
    if (seq_len + encoder_len + last > smla_size(args->req_to_token, 1)) {
        return smla_fail_value(error, op,
                               "`req_to_token` must have a column for each of the %lld tokens of "
                               "request %lld, got %lld",
                               (long long)(seq_len + encoder_len + last), (long long)req,
                               (long long)smla_size(args->req_to_token, 1));
    }
    if (encoders.values != NULL && encoders.values[req * encoders.stride] < 0) {
        return smla_fail_value(error, op, "`encoder_lens` must be >= 0, got %d at request %lld",
                               encoders.values[req * encoders.stride], (long long)req);
    }
    if (extends.values != NULL) {
        const int64_t len = extends.values[req * extends.stride];
        if (len < 0 || len > seq_len) {
            return smla_fail_value(error, op,
                                   "`extend_seq_lens` must be 0 to seq_len = %lld, got %lld at "
                                   "request %lld",
                                   (long long)seq_len, (long long)len, (long long)req);
        }
        if (args->is_fixed && len > batch->max_query_len) {
            return smla_fail_value(error, op,
                                   "`extend_seq_lens` must be at most the %lld tokens per request "
                                   "of the capture, got %lld at request %lld",
                                   (long long)batch->max_query_len, (long long)len, (long long)req);
        }
    }
    if (seqs.values != NULL && seqs.values[req * seqs.stride] > 0) {
        const smla_int_vector pool = ints_of(args->req_pool_indices);
        const int64_t row = smla_int_at(&pool, req);
        if (row < 0 || row >= smla_size(args->req_to_token, 0)) {
            return smla_fail_value(error, op,
                                   "`req_pool_indices` must be 0 to %lld, got %lld at request %lld",
                                   (long long)smla_size(args->req_to_token, 0) - 1, (long long)row,
                                   (long long)req);
        }
    }
    return SMLA_OK;
}

static smla_status
check_requests(const smla_paged_builder *b, const smla_paged_build_args *args,
               const smla_paged_batch *batch, smla_error *error)
{
    const known_lens lens = {seqs_of(args), extends_of(args), encoders_of(args)};
    const host_lens *const seqs = &lens.seqs;
    const bool is_known = seqs->values != NULL || seqs->bounds != NULL;
    const int64_t drafts = b->config.num_draft_tokens;
    int64_t mask_entries = 0;
    for (int64_t req = 0; is_known && req < args->num_reqs; req++) {
        SMLA_TRY(check_request(b, args, batch, &lens, req, error));
        mask_entries += seqs->values == NULL ? 0 : drafts * (known_at(seqs, req) + drafts);
    }
    if (batch->mode == SMLA_PAGED_VERIFY_TREE && smla_size(args->custom_mask, 0) < mask_entries) {
        return smla_fail_value(error, op,
                               "`custom_mask` must have num_draft_tokens rows of seq_len + "
                               "num_draft_tokens entries per request, %lld, got %lld",
                               (long long)mask_entries, (long long)smla_size(args->custom_mask, 0));
    }
    return SMLA_OK;
}

/* Checks how many slots and query tokens there are. */
static smla_status
check_tokens(const smla_paged_builder *b, const smla_paged_build_args *args,
             const smla_paged_batch *batch, smla_error *error)
{
    const smla_paged_config *const config = &b->config;
    const bool is_exact =
        batch->query_len > 0 || args->is_fixed || b->step.device.device_type == kDLCPU;
    if (batch->query_len == 0 && b->step.device.device_type == kDLCPU &&
        batch->num_tokens > config->max_num_tokens) {
        return smla_fail_value(
            error, op, "`%s` must be at most max_num_tokens = %lld tokens together, got %lld",
            args->extend_seq_lens == NULL ? "seq_lens" : "extend_seq_lens",
            (long long)config->max_num_tokens, (long long)batch->num_tokens);
    }
    if (args->out_cache_loc == NULL) {
        return SMLA_OK;
    }
    const int64_t count = smla_size(args->out_cache_loc, 0);
    const bool is_tree_draft = batch->mode == SMLA_PAGED_DRAFT_TREE;
    const int64_t least = is_tree_draft
                              ? args->num_reqs * config->topk * config->speculative_num_steps
                          : is_exact ? batch->num_tokens
                                     : 0;
    const int64_t most = is_tree_draft ? least : smla_paged_most_loc(config);
    if (count < least || count > most) {
        return smla_fail_value(error, op,
                               "`out_cache_loc` must have %lld to %lld entries, a slot for each "
                               "query token%s, got %lld",
                               (long long)least, (long long)most,
                               is_tree_draft ? " of all steps" : "", (long long)count);
    }
    return SMLA_OK;
}

/* Checks what a capture fixes. */
static smla_status
check_fixed(const smla_paged_builder *b, const smla_paged_build_args *args, smla_error *error)
{
    const int64_t query_len = find_mode(b, args).query_len;
    const int64_t least = args->num_reqs * (query_len > 0 ? query_len : 1);
    const int64_t most = query_len > 0 ? least : b->config.max_num_tokens;
    if (!args->is_fixed) {
        SMLA_TRY(smla_require_count(op, "num_tokens", args->num_tokens, 0, 0, error));
        return smla_require_count(op, "num_padding_reqs", args->num_padding_reqs, 0, 0, error);
    }
    if (args->num_padding_reqs < 0 || args->num_padding_reqs > args->num_reqs) {
        return smla_fail_value(error, op, "`num_real_reqs` must be 0 to %lld, got %lld",
                               (long long)args->num_reqs,
                               (long long)(args->num_reqs - args->num_padding_reqs));
    }
    if (args->num_tokens < least || args->num_tokens > most ||
        (least > 0 && args->num_tokens % args->num_reqs != 0)) {
        return query_len > 0
                   ? smla_fail_value(error, op,
                                     "`num_tokens` must be %lld for each of the %lld requests, got "
                                     "%lld",
                                     (long long)query_len, (long long)args->num_reqs,
                                     (long long)args->num_tokens)
                   : smla_fail_value(error, op,
                                     "`num_tokens` must be as many for each of the %lld requests, "
                                     "at most max_num_tokens = %lld together, got %lld",
                                     (long long)args->num_reqs, (long long)most,
                                     (long long)args->num_tokens);
    }
    return smla_require_count(op, "common_prefix_len", args->common_prefix_len, 0, 0, error);
}

static smla_status
check_prefix(const smla_paged_builder *b, const smla_paged_build_args *args,
             const smla_paged_batch *batch, smla_error *error)
{
    const smla_paged_config *const config = &b->config;
    const int64_t prefix_len = args->common_prefix_len;
    if (prefix_len == 0) {
        return SMLA_OK;
    }
    if (!smla_paged_modes[batch->mode].shares_prefix || config->has_window ||
        config->attention_chunk > 0 || config->is_encoder_decoder) {
        return smla_fail_value(error, op,
                               "`common_prefix_len` must be 0 with drafts, a tree, a window, a "
                               "chunk or an encoder, got %lld",
                               (long long)prefix_len);
    }
    const host_lens seqs = seqs_of(args), extends = extends_of(args);
    int64_t most = args->num_reqs == 0 ? 0 : INT64_MAX;
    for (int64_t req = 0; req < args->num_reqs; req++) {
        const int64_t seq_len = known_at(&seqs, req);
        const int64_t query_len = batch->query_len > 0            ? batch->query_len
                                  : args->extend_seq_lens == NULL ? seq_len
                                                                  : known_at(&extends, req);
        most = smla_least_of(most, seq_len + batch->added - query_len);
    }
    return prefix_len > 0 && prefix_len <= most
               ? SMLA_OK
               : smla_fail_value(error, op,
                                 "`common_prefix_len` must be 0 to the shortest context, %lld, got "
                                 "%lld",
                                 (long long)(most > 0 ? most : 0), (long long)prefix_len);
}

smla_status
smla_paged_check_args(const smla_step *s, const smla_batch *unused, const void *given,
                      smla_error *error)
{
    const smla_paged_builder *const b = (const smla_paged_builder *)s;
    const smla_paged_build_args *const args = given;
    (void)unused;
    SMLA_TRY(check_mode(b, args, error));
    SMLA_TRY(check_fixed(b, args, error));
    SMLA_TRY(check_arrays(b, args, error));
    SMLA_TRY(check_bounds(b, args, error));
    const smla_paged_batch batch = smla_paged_find_batch(b, args);
    SMLA_TRY(check_requests(b, args, &batch, error));
    SMLA_TRY(check_tokens(b, args, &batch, error));
    return check_prefix(b, args, &batch, error);
}

/* ---- The kernel ---------------------------------------------------------------------------- */

static smla_paged_tree_rows
rows_of(const smla_paged_row_state *state, int64_t first, int64_t most_rows, int64_t columns)
{
    return state->seqlens == NULL
               ? (smla_paged_tree_rows){.seqlens = NULL}
               : (smla_paged_tree_rows){.seqlens = state->seqlens + first * most_rows,
                                        .starts = state->starts + first * (most_rows + 1),
                                        .slots = state->slots,
                                        .seqlens_stride_step = most_rows,
                                        .starts_stride_step = most_rows + 1,
                                        .slots_stride = columns};
}

/* Entries of out_cache_loc that each request has; 0 if there may be others. */
static int64_t
find_loc_per_req(const smla_paged_builder *b, const smla_paged_build_args *args,
                 const smla_paged_batch *batch)
{
    const int64_t count = smla_size(args->out_cache_loc, 0);
    const int64_t branches = b->config.topk > 1 ? b->config.topk : 1;
    const int64_t of_steps = branches * b->config.speculative_num_steps;
    return smla_paged_modes[batch->mode].is_draft && count == args->num_reqs * of_steps ? of_steps
           : count == args->num_reqs * batch->query_len ? batch->query_len
                                                        : 0;
}

smla_status
smla_paged_fill_lists(const smla_step *s, const void *given, smla_stream stream, smla_error *error)
{
    const smla_paged_builder *const b = (const smla_paged_builder *)s;
    const smla_paged_build_args *const args = given;
    const smla_paged_config *const c = &b->config;
    const smla_paged_batch batch = smla_paged_find_batch(b, args);
    const smla_paged_state *const state = &b->made.modes[batch.mode];
    const bool is_draft = smla_paged_modes[batch.mode].is_draft;
    const bool is_mapped = c->has_window_pool && args->out_cache_loc != NULL;
    const int64_t first = is_draft ? args->spec_step : 0;
    const int64_t most_rows = c->max_bs * batch.rows_per_req;
    const int64_t most_local = smla_paged_most_local(c, batch.mode);
    const smla_paged_step_params params = {
        .call = {.op = op, .stream = stream},
        .num_reqs = args->num_reqs,
        .num_real_reqs = args->num_reqs - args->num_padding_reqs,
        .seq_lens = smla_data(args->seq_lens),
        .seq_lens_stride = smla_stride(args->seq_lens, 0),
        .pool = ints_of(args->req_pool_indices),
        .req_to_token = smla_data(args->req_to_token),
        .pool_stride = smla_stride(args->req_to_token, 0),
        .num_pool_rows = smla_size(args->req_to_token, 0),
        .pool_width = smla_size(args->req_to_token, 1),
        .mapping = smla_data(args->full_to_swa_index_mapping),
        .mapping_stride = smla_stride(args->full_to_swa_index_mapping, 0),
        .num_mapped = c->has_window_pool ? smla_size(args->full_to_swa_index_mapping, 0) : 0,
        .extend_lens = smla_data(args->extend_seq_lens),
        .extend_lens_stride = smla_stride(args->extend_seq_lens, 0),
        .encoder_lens = smla_data(args->encoder_lens),
        .encoder_lens_stride = smla_stride(args->encoder_lens, 0),
        .mask = batch.mode == SMLA_PAGED_VERIFY_TREE ? smla_data(args->custom_mask) : NULL,
        .mask_stride = smla_stride(args->custom_mask, 0),
        .mask_entries = smla_size(args->custom_mask, 0),
        .cache_loc = ints_of(args->out_cache_loc),
        .num_cache_loc = is_mapped ? smla_size(args->out_cache_loc, 0) : 0,
        .loc_per_req = is_mapped ? find_loc_per_req(b, args, &batch) : 0,
        .page_size = c->page_size,
        .max_context_len = c->max_context_len,
        .max_tokens = batch.query_len > 0 ? INT32_MAX : c->max_num_tokens,
        .query_len = batch.query_len,
        .most_query_len = args->is_fixed ? batch.max_query_len : INT32_MAX,
        .reads_tokens_alone = args->is_fixed && batch.query_len == 0,
        .added = batch.added,
        .num_steps = batch.num_steps,
        .rows_per_req = batch.rows_per_req,
        .tree_slots = first + 1,
        .row_loc = c->speculative_num_steps,
        .left = c->sliding_window_size,
        .chunk = c->attention_chunk,
        .table_columns = batch.table_columns,
        .encoder_columns =
            args->is_fixed ? 0 : (batch.max_encoder_len + c->page_size - 1) / c->page_size,
        .cache_seqlens = state->cache_seqlens + first * c->max_bs,
        .seqlens_stride_step = c->max_bs,
        .cu_seqlens_k = state->cu_seqlens_k + first * (c->max_bs + 1),
        .starts_stride_step = c->max_bs + 1,
        .cu_seqlens_q = state->cu_seqlens_q,
        .page_table = state->page_table,
        .swa_page_table = state->swa_page_table,
        .table_stride = b->table_width,
        .swa_cache_loc = is_mapped ? state->swa_cache_loc : NULL,
        .leftpad = args->common_prefix_len > 0 || c->is_encoder_decoder ? state->leftpad : NULL,
        .encoder_seqlens = state->encoder_seqlens,
        .encoder_starts = state->encoder_starts,
        .encoder_table = state->encoder_table,
        .expand =
            rows_of(&state->expand, first, most_rows, smla_paged_expand_columns(c, batch.mode)),
        .swa = rows_of(&state->swa, first, most_rows, smla_paged_swa_columns(c, batch.mode)),
        .token_ids = b->made.token_ids,
        .num_tokens = smla_least_of(batch.num_tokens, smla_paged_most_tokens(c, batch.mode)),
        .num_local = most_local,
        .local_starts = state->local_starts,
        .local_seqlens = most_local == 0 ? NULL : state->local_seqlens + first * most_local,
        .local_table =
            most_local == 0
                ? NULL
                : state->local_table + first * most_local * (c->attention_chunk / c->page_size),
        .prefix_len = args->common_prefix_len,
        .prefix = args->common_prefix_len > 0 ? state->prefix : NULL,
        .rest_seqlens = args->common_prefix_len > 0 ? state->rest_seqlens : NULL,
    };
    return s->backend->fill_paged_lists(&params, error);
}
