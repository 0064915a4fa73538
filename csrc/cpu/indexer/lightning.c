/* lightning.c: lightning_indexer. The logits of a chunk are still in a cache when top-k reads them.
 */
#include "core/params_indexer.h"
#include "cpu/cpu.h"

enum { ROW_ALIGNMENT = 64 }; /* elements: rows of logits begin at a cache line */

/* The same call with rows of logits as long as the longest context, and as many tokens per chunk as
 * then have room. A wide block table would make small chunks. */
static smla_lightning_params
shorten_rows(const smla_lightning_params *p)
{
    smla_lightning_params shorter = *p;
    smla_logits_params *const logits = &shorter.logits;
    if (!logits->leaves_rest) {
        return shorter;
    }
    const int64_t longest = smla_cpu_longest_context(logits);
    const int64_t lines = (longest + ROW_ALIGNMENT - 1) / ROW_ALIGNMENT;
    const int64_t stride = lines < 1 ? ROW_ALIGNMENT : lines * ROW_ALIGNMENT;
    if (stride >= logits->out_stride_token || logits->num_tokens == 0) {
        return shorter;
    }
    const int64_t unit = SMLA_CPU_CHUNK_TOKENS;
    const int64_t cached =
        SMLA_CPU_CHUNK_LOGITS_BYTES / (logits->out_type == SMLA_FLOAT_BF16 ? 2 : 4);
    const int64_t room = p->chunk_tokens * logits->out_stride_token / stride;
    const int64_t most = cached / stride < unit ? unit : cached / stride;
    shorter.chunk_tokens =
        smla_lightning_chunk_tokens(logits->num_tokens, room < most ? room : most, unit);
    logits->num_columns = longest;
    logits->out_stride_token = stride;
    shorter.top_k.logits_stride_token = stride;
    return shorter;
}

/* Scratch that serves both steps. */
static smla_scratch_size
choose_scratch(const smla_lightning_params *p)
{
    const smla_scratch_size none = {.num_parts = 1};
    const smla_scratch_size a = p->logits.out == NULL ? none : smla_cpu_logits_scratch(&p->logits);
    const smla_scratch_size b = smla_cpu_top_k_scratch(&p->top_k);
    return (smla_scratch_size){a.num_parts > b.num_parts ? a.num_parts : b.num_parts,
                               a.part_bytes > b.part_bytes ? a.part_bytes : b.part_bytes};
}

static smla_status
run_chunks(const smla_lightning_params *p, const smla_thread_scratch *scratch, smla_error *error)
{
    for (int64_t token = 0; token < p->logits.num_tokens; token += p->chunk_tokens) {
        const smla_lightning_params chunk = smla_lightning_chunk(p, token);
        if (chunk.logits.out != NULL) {
            SMLA_TRY(smla_cpu_score_keys(&chunk.logits, scratch, error));
        }
        SMLA_TRY(smla_cpu_choose_keys(&chunk.top_k, scratch, error));
    }
    return SMLA_OK;
}

smla_status
smla_cpu_lightning_indexer(const smla_lightning_params *given, smla_error *error)
{
    SMLA_TRY(smla_cpu_check_logits(&given->logits, error));
    if (given->top_k.slots.out != NULL) {
        SMLA_TRY(smla_cpu_check_global_topk(&given->top_k.slots, error));
    }
    const smla_lightning_params p = shorten_rows(given);
    smla_thread_scratch scratch;
    SMLA_TRY(smla_open_scratch(&scratch, p.call.op, choose_scratch(&p), error));
    const smla_status status = run_chunks(&p, &scratch, error);
    smla_close_scratch(&scratch);
    return status;
}
