/* lightning.c: lightning_indexer. The logits of a chunk are still in a cache when top-k reads them.
 */
#include "cpu/machine/cpu.h"

smla_status
smla_cpu_lightning_indexer(const smla_lightning_params *p, smla_error *error)
{
    SMLA_TRY(smla_cpu_check_logits(&p->logits, error));
    if (p->top_k.slots.out != NULL) {
        SMLA_TRY(smla_cpu_check_global_topk(&p->top_k.slots, error));
    }
    for (int64_t token = 0; token < p->logits.num_tokens; token += p->chunk_tokens) {
        const smla_lightning_params chunk = smla_lightning_chunk(p, token);
        if (chunk.logits.out != NULL) {
            SMLA_TRY(smla_cpu_score_keys(&chunk.logits, error));
        }
        SMLA_TRY(smla_cpu_choose_keys(&chunk.top_k, error));
    }
    return SMLA_OK;
}
