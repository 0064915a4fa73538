/* logits_plan.h: how the kernel of logits_sm90.cu cuts a call into work items. The plan depends on
 * counts only, so the C tests can check it for devices that the machine does not have. */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum {
    SMLA_LOGITS_TILE_KEYS = 64,
    SMLA_LOGITS_MOST_EVEN_TOKENS = 4, /* most tokens of a block where CTAs have equal shares */
};

/* A block is the tokens that a CTA takes together: `group_tokens` for each of `num_groups` groups.
 * Blocks never span two requests of `req_tokens` tokens, so the tokens of a block have the same
 * keys if every request has so many. Request r has `req_blocks` blocks from block r * req_blocks
 * on, and its block j begins at token j * group_tokens * num_groups of the request.
 *
 * A work item is a block and every `step`-th tile of its keys. Where `is_even`, the CTAs have equal
 * shares of all blocks' tiles, which they count themselves, and `step` is 1: requests of a decode
 * differ in length, and so do their blocks. A prefill has many work items, of about equal
 * length. */
typedef struct smla_logits_plan {
    int32_t group_tokens;
    int32_t num_groups;
    int32_t req_tokens; /* tokens per request; all tokens, if requests differ */
    int32_t req_blocks;
    int32_t token_blocks;
    int32_t step;
    int32_t num_work_items;
    bool is_even;
} smla_logits_plan;

/* Plans a call. `num_heads` is 32 or 64. Flat keys count as one request. */
smla_logits_plan smla_plan_logits(int64_t num_heads, int64_t num_tokens, int64_t num_reqs,
                                  int64_t num_columns, int64_t num_sms, bool can_be_even);

#ifdef __cplusplus
}
#endif
