/* logits_plan.h: how the kernel of logits_sm90.cu cuts a call into works. It knows counts only, so
 * that the C tests can try it on devices that the machine need not have.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum {
    SMLA_LOGITS_TILE_KEYS = 64,
    SMLA_LOGITS_MOST_EVEN_TOKENS = 4, /* tokens of a block, where CTAs share equally */
};

/* A block is what a CTA takes of the tokens: `group_tokens` for each of `num_groups` groups. Blocks
 * cut the tokens of each request apart, so that the tokens of a block have the same keys where
 * every request has `req_tokens`. Request r has blocks req_blocks r and following, and block j of
 * them begins at its token j group_tokens num_groups.
 *
 * A work is a block and every `step`-th tile of its keys. Where `is_even`, the CTAs have equal
 * shares of all blocks' tiles, which they count themselves, and `step` is 1. Requests of a decode
 * differ in length, so their blocks do. In a prefill there are many works, which do not. */
typedef struct smla_logits_plan {
    int32_t group_tokens;
    int32_t num_groups;
    int32_t req_tokens; /* all tokens, if requests differ */
    int32_t req_blocks;
    int32_t token_blocks;
    int32_t step;
    int32_t num_works;
    bool is_even;
} smla_logits_plan;

/* `num_heads` is 32 or 64. Flat keys count as one request. */
smla_logits_plan smla_plan_logits(int64_t num_heads, int64_t num_tokens, int64_t num_reqs,
                                  int64_t num_columns, int64_t num_sms, bool can_be_even);

#ifdef __cplusplus
}
#endif
