/* index.c: positions inside a request -> slots of the cache, or rows of the prefill workspace.
 *
 * Order is kept and nothing is compacted: an entry that names no key becomes -1 where it stands.
 */
#include "core/params_index.h"
#include "cpu/cpu.h"
#include "cpu/index/slot.h"
#include "cpu/isa.h"
#include "cpu/machine/threads.h"

smla_status
smla_cpu_check_convert(const smla_convert_params *p, smla_error *error)
{
    static const char op[] = "convert_req_index_to_global_index";
    for (int64_t token = 0; token < p->num_tokens; token++) {
        const int32_t req = p->req_id_per_token[token * p->req_id_stride];
        if (req < 0 || req >= p->num_reqs) {
            return smla_fail_value(error, op,
                                   "`req_id_per_token` must name a row of `block_table` (0 to "
                                   "%lld), got %d at token %lld",
                                   (long long)p->num_reqs - 1, req, (long long)token);
        }
        if (p->prefill_request_ids == NULL) {
            continue;
        }
        const int32_t prefill = p->prefill_request_ids[token * p->prefill_request_ids_stride];
        if (prefill >= p->num_prefills) {
            return smla_fail_value(
                error, op,
                "`prefill_request_ids` must name an entry of `prefill_workspace_starts` (0 to "
                "%lld) or be -1, got %d at token %lld",
                (long long)p->num_prefills - 1, prefill, (long long)token);
        }
        const int32_t start =
            prefill < 0 ? 0
                        : p->prefill_workspace_starts[prefill * p->prefill_workspace_starts_stride];
        if (start < 0) {
            return smla_fail_value(error, op,
                                   "`prefill_workspace_starts` must be >= 0, got %d at entry %d",
                                   start, prefill);
        }
    }
    return SMLA_OK;
}

static void
convert_token(const smla_slot_isa *kernel, const smla_convert_params *p, int64_t token)
{
    const int64_t req = p->req_id_per_token[token * p->req_id_stride];
    const smla_page_row row = {p->block_table + req * p->block_table_stride_req,
                               p->block_table_stride_block, p->num_blocks, p->block_size};
    const int32_t *in = p->topk_indices + token * p->topk_indices_stride_token;
    int32_t *out = p->out + token * p->out_stride_token;
    int32_t workspace_start = -1; /* negative: slots of the cache */
    if (p->prefill_request_ids != NULL) {
        const int64_t prefill = p->prefill_request_ids[token * p->prefill_request_ids_stride];
        if (prefill >= 0) {
            workspace_start =
                p->prefill_workspace_starts[prefill * p->prefill_workspace_starts_stride];
        }
    }
    const int64_t count = workspace_start < 0
                              ? kernel->find_slots(&row, in, p->topk, out)
                              : kernel->find_rows(&row, workspace_start, in, p->topk, out);
    if (p->counts != NULL) {
        p->counts[token * p->counts_stride] = (int32_t)count;
    }
}

smla_status
smla_cpu_convert_req_index_to_global_index(const smla_convert_params *p, smla_error *error)
{
    const smla_cpu_isa *isa = NULL;
    SMLA_TRY(smla_cpu_choose_isa("convert_req_index_to_global_index", &isa, error));
    SMLA_TRY(smla_cpu_check_convert(p, error));
#pragma omp parallel for schedule(static) if (p->num_tokens * p->topk >= 1 << 16)
    for (int64_t token = 0; token < p->num_tokens; token++) {
        convert_token(isa->slot, p, token);
    }
    return SMLA_OK;
}
