/* v4_plan.c: the arithmetic of a DeepSeek V4 step: limits, widths of lists, rows of the workspace,
 * positions and lengths, chunks. It computes with host integers only.
 */
#include "core/rule.h"
#include "step/plan.h"
#include "step/v4_builder.h"

static const char op[] = "MetadataBuilder";

/* ---- Config -------------------------------------------------------------------------------- */

static smla_status
check_counts(const smla_v4_config *config, smla_error *error)
{
    const smla_config_count counts[] = {
        {"num_heads", config->num_heads, SMLA_MAX_HEADS},
        {"window", config->window, INT32_MAX / 2},
        {"topk_tokens", config->topk_tokens, INT32_MAX / 2},
        {"block_size", config->block_size, INT32_MAX},
        {"swa_block_size", config->swa_block_size, INT32_MAX},
        {"max_num_seqs", config->max_num_seqs, INT32_MAX - 1},
        {"max_num_batched_tokens", config->max_num_batched_tokens, INT32_MAX},
        {"max_model_len", config->max_model_len, INT32_MAX / 2},
        {"decode_threshold", config->decode_threshold, INT32_MAX},
        {"prefill_chunk_size", config->prefill_chunk_size, INT32_MAX},
    };
    SMLA_TRY(smla_check_config_counts(op, counts, sizeof counts / sizeof counts[0], error));
    return smla_require_count(op, "num_ratios", config->num_ratios, 0, SMLA_V4_MAX_RATIOS, error);
}

static smla_status
check_ratios(const smla_v4_config *config, smla_error *error)
{
    for (int i = 0; i < config->num_ratios; i++) {
        const int64_t ratio = config->ratios[i];
        SMLA_TRY(smla_require_count(op, "compress_ratios", ratio, 2, INT32_MAX, error));
        SMLA_TRY(smla_require_count(op, "state_block_sizes", config->state_block_sizes[i], 1,
                                    INT32_MAX, error));
        if (smla_v4_find_ratio(config, ratio) != i) {
            return smla_fail(error, SMLA_ERROR_VALUE,
                             "%s: `compress_ratios` must be different, got %lld twice", op,
                             (long long)ratio);
        }
        if (config->block_size % ratio != 0) {
            return smla_fail(error, SMLA_ERROR_VALUE,
                             "%s: `block_size` must be a multiple of each compress ratio (%lld), "
                             "got %lld",
                             op, (long long)ratio, (long long)config->block_size);
        }
    }
    return SMLA_OK;
}

static smla_status
check_format(const char *name, int32_t number, bool is_extra, smla_error *error)
{
    const smla_kv_format_info *const format = smla_find_kv_format(number);
    const smla_kv_set served = is_extra ? SMLA_KV_EXTRA : SMLA_KV_ATTENTION;
    for (int i = 0; format != NULL && i < SMLA_NUM_KV_FORMATS; i++) {
        const smla_kv_format_info *const row = &smla_kv_formats[i]; /* a name may have two rows */
        if (row->format == format->format && row->head_dim == SMLA_V4_HEAD_DIM &&
            (served & SMLA_KV_SET(i)) != 0) {
            return SMLA_OK;
        }
    }
    return smla_fail(error, SMLA_ERROR_VALUE,
                     "%s: `%s` must be a format of keys of %d values that attention takes, got %s",
                     op, name, SMLA_V4_HEAD_DIM, format == NULL ? "an unknown one" : format->name);
}

smla_status
smla_v4_check_config(const smla_v4_config *config, smla_error *error)
{
    SMLA_TRY(check_counts(config, error));
    SMLA_TRY(check_ratios(config, error));
    SMLA_TRY(check_format("kv_format", config->kv_format, false, error));
    SMLA_TRY(check_format("compressed_kv_format", config->compressed_kv_format, true, error));
    if (config->path != SMLA_PATH_AUTO && config->path != SMLA_PATH_DIRECT &&
        config->path != SMLA_PATH_SEPARATE) {
        return smla_fail(error, SMLA_ERROR_VALUE,
                         "%s: `path` must be \"direct\" or \"separate\", got %d", op, config->path);
    }
    SMLA_TRY(smla_require_finite(op, "softmax_scale", config->softmax_scale, error));
    SMLA_TRY(smla_require_positive(op, "q_scale", config->q_scale, error));
    return smla_require_positive(op, "kv_scale", config->kv_scale, error);
}

int
smla_v4_find_ratio(const smla_v4_config *config, int64_t ratio)
{
    for (int i = 0; i < config->num_ratios; i++) {
        if (config->ratios[i] == ratio) {
            return i;
        }
    }
    return -1;
}

int
smla_v4_num_groups(const smla_v4_config *config)
{
    return (int)config->num_ratios + (smla_v4_find_ratio(config, SMLA_V4_INDEXED_RATIO) >= 0);
}

int64_t
smla_v4_group_ratio(const smla_v4_config *config, int group)
{
    return group < config->num_ratios ? config->ratios[group] : SMLA_V4_INDEXED_RATIO;
}

/* ---- Widths and rows ----------------------------------------------------------------------- */

static int64_t
round_up(int64_t value, int64_t unit)
{
    return (value + unit - 1) / unit * unit;
}

int64_t
smla_v4_list_columns(const smla_v4_config *config, int64_t ratio)
{
    return round_up((config->max_model_len + ratio - 1) / ratio, SMLA_V4_LIST_ALIGN);
}

int64_t
smla_v4_used_columns(const smla_v4_config *config, int64_t ratio, int64_t max_seq_len)
{
    const int64_t most = smla_v4_list_columns(config, ratio);
    int64_t used = SMLA_V4_LIST_ALIGN;
    while (used < max_seq_len / ratio && used < most) {
        used *= 2;
    }
    return used < most ? used : most;
}

smla_v4_rows
smla_v4_workspace_rows(const smla_v4_config *config, int64_t ratio)
{
    const int64_t start = ratio > 1 ? (config->max_model_len + ratio - 1) / ratio : 0;
    return (smla_v4_rows){.window_start = start,
                          .request_rows = start + config->window + config->max_num_batched_tokens};
}

int64_t
smla_v4_workspace_size(const smla_v4_config *config)
{
    int64_t most = smla_v4_workspace_rows(config, 1).request_rows;
    for (int i = 0; i < config->num_ratios; i++) {
        const int64_t rows = smla_v4_workspace_rows(config, config->ratios[i]).request_rows;
        most = rows > most ? rows : most;
    }
    return config->path == SMLA_PATH_SEPARATE ? most * config->prefill_chunk_size : 0;
}

/* ---- A step -------------------------------------------------------------------------------- */

static void
fill_positions(const smla_v4_config *config, const smla_batch *batch, int32_t *positions)
{
    int64_t t = 0;
    for (int64_t req = 0; req < batch->num_reqs; req++) {
        const int64_t end = batch->query_start_loc[req + 1];
        for (; t < end; t++) {
            positions[t] = (int32_t)(batch->seq_lens[req] - (end - t));
        }
    }
    for (; t < config->max_num_batched_tokens; t++) {
        positions[t] = 0;
    }
}

void
smla_v4_fill_step(const smla_v4_config *config, const smla_batch *batch, const smla_v4_step *step)
{
    const smla_batch_limits limits = {.max_num_batched_tokens = config->max_num_batched_tokens};
    smla_fill_req_ids(&limits, batch, step->req_id_per_token);
    fill_positions(config, batch, step->positions);
    step->query_start_loc[0] = 0;
    for (int64_t req = 0; req < batch->num_reqs; req++) {
        const int32_t seq_len = batch->seq_lens[req];
        const int64_t query_len = smla_query_len(batch->query_start_loc, req);
        const int64_t context = seq_len - query_len;
        const int64_t before = config->window - 1;
        step->query_start_loc[req + 1] = batch->query_start_loc[req + 1];
        step->seq_lens[req] = seq_len;
        step->gather_lens[req] = (int32_t)(query_len + (context < before ? context : before));
        for (int i = 0; i < config->num_ratios; i++) {
            step->compressed_lens[i][req] = (int32_t)(seq_len / config->ratios[i]);
        }
    }
}

int64_t
smla_v4_cut_chunks(const smla_v4_config *config, const smla_batch *batch, int64_t num_decodes,
                   smla_v4_chunk *chunks)
{
    int64_t count = 0;
    for (int64_t req = num_decodes; req < batch->num_reqs; req += config->prefill_chunk_size) {
        const int64_t left = batch->num_reqs - req;
        const int64_t end =
            req + (left < config->prefill_chunk_size ? left : config->prefill_chunk_size);
        chunks[count++] = (smla_v4_chunk){.req_start = req,
                                          .req_end = end,
                                          .token_start = batch->query_start_loc[req],
                                          .token_end = batch->query_start_loc[end]};
    }
    return count;
}
