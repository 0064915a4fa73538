/* plan_dense_context.c: the prefills of a dense step on path "separate": whether a step takes that
 * path, and the chunks of their cached context, which context.c cuts.
 */
#include "core/rule.h"
#include "step/chunks.h"
#include "step/plans/plan_dense.h"

/* ---- Buffers ------------------------------------------------------------------------------- */

/* The most chunks of context of a step, and the most parts of requests in them. */
typedef struct most_chunks {
    int64_t chunks;
    int64_t parts;
} most_chunks;

static most_chunks
count_chunks(const smla_dense_builder *b)
{
    const smla_dense_config *const config = &b->config;
    const int64_t page = config->block_size, rows = b->workspace_tokens;
    const int64_t by_tokens = config->max_num_batched_tokens / (config->decode_threshold + 1);
    /* The prefills with context, because they have query tokens; others may stand between them. */
    const int64_t prefills = by_tokens < config->max_num_seqs ? by_tokens : config->max_num_seqs;
    if (rows == 0 || prefills == 0) {
        return (most_chunks){0, 0};
    }
    if (config->context_plan == SMLA_CONTEXT_PACKED) {
        /* A request has a part in the chunk that the one before it left room in, if only an empty
         * one, and then fills whole chunks. */
        const int64_t each =
            1 + (config->max_model_len + rows / page * page - 1) / (rows / page * page);
        return (most_chunks){prefills * each, prefills * each + config->max_num_seqs - prefills};
    }
    const int64_t sharing = rows / page < prefills ? rows / page : prefills;
    const int64_t least = rows / sharing / page * page;
    const int64_t chunks = (config->max_model_len + least - 1) / least;
    return (most_chunks){chunks, chunks * config->max_num_seqs};
}

void
smla_dense_list_chunks(smla_step *s)
{
    const smla_dense_builder *const b = (const smla_dense_builder *)s;
    const most_chunks most = count_chunks(b);
    SMLA_ADD_ARRAY(&s->sent, smla_dense_sent, context_starts, most.parts);
    SMLA_ADD_ARRAY(&s->sent, smla_dense_sent, context_lens, most.parts);
    SMLA_ADD_ARRAY(&s->sent, smla_dense_sent, context_key_starts, most.parts + most.chunks);
    SMLA_ADD_ARRAY(&s->sent, smla_dense_sent, context_query_starts, most.parts + most.chunks);
    SMLA_ADD_ARRAY(&s->kept, smla_dense_kept, context_chunks, 2 * SMLA_CHUNK_NUMBERS * most.chunks);
    SMLA_ADD_ARRAY(&s->kept, smla_dense_kept, context_lens,
                   b->workspace_tokens == 0 ? 0 : s->limits.max_num_seqs);
    s->max_num_chunks = most.chunks > s->max_num_chunks ? most.chunks : s->max_num_chunks;
}

/* ---- Path ---------------------------------------------------------------------------------- */

/* How fast a kind of device does the parts of a step: FLOP, or bytes, per picosecond. Measured with
 * heads of 192 and 128 values, because the ways to attend reach different parts of a device's
 * peak. Only the proportions count. */
typedef struct step_rates {
    DLDeviceType device_type;
    int32_t capability; /* a GPU's compute capability; 0: any */
    double absorbed;    /* FLOP of attention to latents */
    double expanded;    /* FLOP of attention to keys and values of every head */
    double projection;  /* FLOP of kv_b_proj, which makes these */
    double memory;      /* bytes of gathers and merges */
} step_rates;

static const step_rates rates[] = {
    /* An H200: Hopper's kernel of dense tiles; its kernel of varlen; cuBLAS; a copy */
    {kDLCUDA, 90, 600.0, 700.0, 700.0, 4.3},
    /* The same GPU with portable kernels alone. Others have slower parts in like proportions. */
    {kDLCUDA, 0, 150.0, 376.0, 700.0, 4.3},
    /* A core of a Xeon with AMX, which attention uses and projections do not */
    {kDLCPU, 0, 0.13, 0.15, 0.05, 0.012},
};

static const step_rates *
find_rates(const smla_step *s)
{
    const int32_t capability = s->backend->capability(s->device.device_id);
    const step_rates *row = rates;
    const step_rates *const last = rates + sizeof rates / sizeof rates[0] - 1;
    while (row < last && (row->device_type != s->backend->device_type ||
                          (row->capability != 0 && row->capability != capability))) {
        row++;
    }
    return row;
}

static int64_t
context_of(const smla_batch *batch, int64_t req)
{
    return batch->seq_lens[req] - smla_query_len(batch->query_start_loc, req);
}

/* Picoseconds per head and token of context that are the same for any number of new tokens: the
 * gather of its latent, which heads share, and its keys and values. */
static double
expand_token(const smla_dense_config *config, const step_rates *rate)
{
    const double latent = SMLA_KV_LORA_RANK + (double)config->qk_rope_head_dim;
    const double values = (double)(config->qk_nope_head_dim + config->v_head_dim);
    const double gathered = 2 * latent * sizeof(uint16_t) / (double)config->num_heads;
    return 2 * SMLA_KV_LORA_RANK * values / rate->projection + gathered / rate->memory;
}

/* Picoseconds per head and new token: a merge reads two rows and writes one, after each chunk.
 * Requests share the workspace, so a chunk has so many of its rows for each. */
static double
merge_token(const smla_dense_builder *b, const step_rates *rate, double context,
            int64_t num_sharing)
{
    const double chunks = context * (double)num_sharing / (double)b->workspace_tokens;
    const double bytes = 3 * (double)b->config.v_head_dim * sizeof(uint16_t);
    return (chunks < 1 ? 1 : chunks) * bytes / rate->memory;
}

/* Whether prefills are estimated to take less time on path "mixed". Few new tokens over a long
 * context do: a pair of a query and a key takes more FLOP there, but no keys and values have to be
 * made, and nothing is merged. Both paths do as much for the new tokens themselves. Of several
 * ranks, each has an equal part of the keys here, and the time is that of rank 0, which attends to
 * all new tokens on path "separate": every rank must come to the same choice. */
static bool
prefers_mixed(const smla_step *s, const smla_batch *batch, int64_t first)
{
    const smla_dense_builder *const b = (const smla_dense_builder *)s;
    const smla_dense_config *const config = &b->config;
    const step_rates *const rate = find_rates(s);
    const double rope = (double)config->qk_rope_head_dim;
    const double values = (double)(config->qk_nope_head_dim + config->v_head_dim);
    const double absorbed = 2 * (2 * SMLA_KV_LORA_RANK + rope) / rate->absorbed; /* per pair */
    const double expanded = 2 * (values + rope) / rate->expanded;
    const double ranks = b->share.size == 0 ? 1 : b->share.size;
    int64_t num_sharing = 0;
    for (int64_t req = first; req < batch->num_reqs; req++) {
        num_sharing += context_of(batch, req) > 0;
    }
    double more = 0; /* picoseconds per head that path "mixed" takes more */
    for (int64_t req = first; req < batch->num_reqs; req++) {
        const double num_new = smla_query_len(batch->query_start_loc, req);
        const double context = (double)context_of(batch, req) / ranks;
        const double new_pairs = num_new * (num_new + 1) / 2;
        more += (num_new * context + new_pairs / ranks) * absorbed;
        more -= (num_new * context + new_pairs) * expanded;
        if (context > 0) {
            more -= context * expand_token(config, rate);
            more -= num_new * merge_token(b, rate, context, num_sharing);
        }
    }
    return more < 0;
}

/* A batch that has decodes behind prefills can only be "mixed", and one without prefills is the
 * same on both paths. */
static smla_path
choose_path(const smla_step *s, const smla_batch *batch, const smla_step_facts *facts)
{
    smla_error ignored;
    const bool is_mixed =
        facts->split.num_prefills == 0 ||
        smla_check_batch_order(smla_build_op, &s->limits, batch, &ignored) != SMLA_OK ||
        prefers_mixed(s, batch, facts->split.num_decodes);
    return is_mixed ? SMLA_PATH_MIXED : SMLA_PATH_SEPARATE;
}

/* ---- Chunks -------------------------------------------------------------------------------- */

/* The prefills whose context is cut. Writes its lengths to the builder's host memory. */
static smla_prefills
read_context(const smla_step *s, const smla_batch *batch, int64_t first)
{
    const smla_dense_builder *const b = (const smla_dense_builder *)s;
    for (int64_t req = first; req < batch->num_reqs; req++) {
        b->kept.context_lens[req - first] =
            (int32_t)smla_count_own(&b->share, context_of(batch, req));
    }
    smla_prefills prefills = smla_prefills_of(batch, first, b->workspace_tokens);
    prefills.lens = b->kept.context_lens;
    prefills.block_size = b->config.block_size;
    prefills.are_cut_equally = b->config.context_plan == SMLA_CONTEXT_EQUAL;
    return prefills;
}

smla_status
smla_dense_cut_chunks(const smla_step *s, const smla_batch *batch, smla_step_facts *facts,
                      smla_error *error)
{
    if (s->path == SMLA_PATH_AUTO) {
        facts->path = choose_path(s, batch, facts);
    }
    if (!smla_step_modes[facts->path].gathers) {
        return SMLA_OK;
    }
    const smla_prefills prefills = read_context(s, batch, facts->split.num_decodes);
    return smla_cut_chunks(s, &prefills, facts, error);
}

void
smla_dense_fill_chunks(const smla_step *s, const smla_batch *batch, const smla_dense_sent *host)
{
    const smla_prefills prefills = read_context(s, batch, s->facts.split.num_decodes);
    smla_context_chunk *const chunks = (void *)((const smla_dense_builder *)s)->kept.context_chunks;
    smla_chunk_list list = {.parts = chunks,
                            .starts = host->context_starts,
                            .lens = host->context_lens};
    smla_error unused; /* cut_chunks has found all errors */
    (void)smla_cut_prefills(smla_build_op, &prefills, &list, &unused);
    for (int64_t i = 0; i < list.num_chunks; i++) {
        const int32_t *const starts = prefills.query_start_loc + chunks[i].req_start;
        const int64_t num_reqs = chunks[i].req_end - chunks[i].req_start;
        int32_t *const keys = host->context_key_starts + chunks[i].first + i;
        int32_t *const queries = host->context_query_starts + chunks[i].first + i;
        keys[0] = queries[0] = 0;
        for (int64_t k = 0; k < num_reqs; k++) {
            keys[k + 1] = keys[k] + host->context_lens[chunks[i].first + k];
            queries[k + 1] = starts[k + 1] - starts[0];
        }
    }
}

/* Chunks of the plan "equal" have a part of every prefill. */
int
smla_dense_show_chunks(const smla_step *s, smla_step_view *views)
{
    const smla_dense_metadata *const m = &((const smla_dense_builder *)s)->metadata;
    const int64_t num_chunks = m->num_context_chunks, num_parts = s->facts.num_parts;
    const smla_context_chunk *const chunks = m->context_chunks;
    const DLTensor *const workspace = &s->workspaces[SMLA_GATHERED].tensor;
    int n = 0;
    smla_show_rows(&views[n], "chunked_prefill_workspace", smla_data(workspace), 0,
                   smla_size(workspace, 0), smla_size(workspace, 1), smla_stride(workspace, 0));
    views[n++].dtype = workspace->dtype;
    smla_show_list(&views[n++], "context_chunk_req_start", &chunks->req_start, num_chunks, 1);
    smla_show_list(&views[n++], "context_chunk_req_end", &chunks->req_end, num_chunks, 1);
    smla_show_list(&views[n++], "context_chunk_first", &chunks->first, num_chunks, 1);
    smla_show_list(&views[n++], "context_chunk_seq_tot", &chunks->num_tokens, num_chunks, 1);
    smla_show_list(&views[n++], "context_chunk_max_seq_lens", &chunks->max_len, num_chunks, 1);
    if (((const smla_dense_builder *)s)->config.context_plan == SMLA_CONTEXT_EQUAL) {
        const int64_t prefills = m->split.num_prefills;
        smla_show_rows(&views[n++], "context_chunk_starts", m->context_chunk_starts, 0, num_chunks,
                       prefills, prefills);
        smla_show_rows(&views[n++], "context_chunk_seq_lens", m->context_chunk_lens, 0, num_chunks,
                       prefills, prefills);
        smla_show_rows(&views[n++], "context_chunk_cu_seq_lens", m->context_chunk_key_starts, 0,
                       num_chunks, prefills + 1, prefills + 1);
        return n;
    }
    smla_show_vector(&views[n++], "context_chunk_starts", m->context_chunk_starts, num_parts);
    smla_show_vector(&views[n++], "context_chunk_seq_lens", m->context_chunk_lens, num_parts);
    smla_show_vector(&views[n++], "context_chunk_cu_seq_lens", m->context_chunk_key_starts,
                     num_parts + num_chunks);
    return n;
}
