/* plan_v4_chunks.c: the prefills of a V4 step in chunks, each of which is one attention call of
 * path "separate". The workspace has a place for each prefill of a chunk, and a call's sums depend
 * on its number of tokens, so prefills without query tokens are left out of both.
 */
#include "core/attention/needs.h"
#include "step/chunks.h"
#include "step/plans/plan_v4.h"

void
smla_v4_list_chunks(smla_step *s)
{
    const smla_v4_config *const config = &((const smla_v4_builder *)s)->config;
    const int64_t reqs = s->limits.max_num_seqs;
    SMLA_ADD_ARRAY(&s->sent, smla_v4_sent, chunk_query_start_loc, reqs + 1);
    SMLA_ADD_ARRAY(&s->sent, smla_v4_sent, chunk_seq_lens, reqs);
    SMLA_ADD_ARRAY(&s->sent, smla_v4_sent, chunk_gather_lens, reqs);
    for (int i = 0; i < config->num_ratios; i++) {
        SMLA_ADD_ARRAY(&s->sent, smla_v4_sent, compressed_lens[i], reqs);
    }
    SMLA_ADD_ARRAY(&s->kept, smla_v4_kept, prefills, reqs);
}

/* The rows that a layer gathers in a step: those of its requests' windows, and the compressed ones
 * of the smallest ratio, which has the most. */
static int64_t
count_rows(const smla_v4_config *config, const smla_batch *batch, int64_t first)
{
    int64_t ratio = INT64_MAX;
    int64_t num_rows = 0;
    for (int i = 0; i < config->num_ratios; i++) {
        ratio = config->compress_ratios[i] < ratio ? config->compress_ratios[i] : ratio;
    }
    for (int64_t req = first; req < batch->num_reqs; req++) {
        if (smla_query_len(batch->query_start_loc, req) > 0) {
            num_rows += smla_v4_gather_len(config, batch, req) + batch->seq_lens[req] / ratio;
        }
    }
    return num_rows;
}

/* Whether the step's prefills read the caches. All layers have the path of the step, so the fewest
 * keys of any layer decide, which are those of the window, and the most rows. */
static bool
prefers_direct(const smla_step *s, const smla_batch *batch, const smla_step_facts *facts)
{
    const smla_v4_config *const config = &((const smla_v4_builder *)s)->config;
    const smla_attention_shape prefills = {
        .num_tokens = facts->split.num_prefill_tokens,
        .num_heads = s->num_heads,
        .topk = config->window,
        .device_id = s->device.device_id,
        .formats = {smla_find_kv_row(config->kv_format, SMLA_V4_HEAD_DIM, SMLA_KV_ATTENTION),
                    smla_find_kv_row(config->compressed_kv_format, SMLA_V4_HEAD_DIM,
                                     SMLA_KV_EXTRA)},
        .needs = config->q_scale == 1 ? 0 : SMLA_NEEDS_QUERY_SCALE,
    };
    const int64_t num_rows = count_rows(config, batch, facts->split.num_decodes);
    return s->backend->prefers_direct(&prefills, num_rows, facts->num_chunks);
}

smla_status
smla_v4_cut_chunks(const smla_step *s, const smla_batch *batch, smla_step_facts *facts,
                   smla_error *error)
{
    smla_prefills prefills =
        smla_prefills_of(batch, facts->split.num_decodes,
                         ((const smla_v4_builder *)s)->config.prefill_chunk_size);
    prefills.counts_requests = true;
    SMLA_TRY(smla_cut_chunks(s, &prefills, facts, error));
    if (((const smla_v4_builder *)s)->plans_path &&
        (facts->split.num_prefill_tokens == 0 || prefers_direct(s, batch, facts))) {
        facts->path = SMLA_PATH_DIRECT;
    }
    return SMLA_OK;
}

void
smla_v4_fill_chunks(const smla_step *s, const smla_batch *batch, const smla_v4_sent *host)
{
    const smla_v4_builder *const b = (const smla_v4_builder *)s;
    const int64_t first = s->facts.split.num_decodes;
    int64_t count = 0;
    for (int64_t i = 0; i < s->facts.split.num_prefills; i++) {
        const int64_t req = first + i;
        if (smla_query_len(batch->query_start_loc, req) == 0) {
            continue;
        }
        b->kept.prefills[count] = (int32_t)i;
        host->chunk_query_start_loc[count] = batch->query_start_loc[req];
        host->chunk_query_start_loc[count + 1] = batch->query_start_loc[req + 1];
        host->chunk_seq_lens[count] = host->seq_lens[req];
        host->chunk_gather_lens[count] = host->gather_lens[req];
        for (int k = 0; k < b->config.num_ratios; k++) {
            host->compressed_lens[k][count] =
                (int32_t)(host->seq_lens[req] / b->config.compress_ratios[k]);
        }
        count++;
    }
}

smla_v4_entries
smla_v4_chunk_entries(const smla_v4_builder *b, int64_t chunk_idx)
{
    const int64_t size = b->config.prefill_chunk_size, count = b->step.facts.num_parts;
    const int64_t start = chunk_idx * size;
    return (smla_v4_entries){start, count - start < size ? count : start + size};
}
