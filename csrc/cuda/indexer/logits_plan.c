/* logits_plan.c: which shape of logits_sm90.cu serves a call, and how SMs share its tiles. */
#include "cuda/indexer/logits_plan.h"

enum {
    GROUP_COLUMNS = 128, /* most columns of a warpgroup: the heads of all its tokens */
    NUM_GROUPS = 3,
    /* Most work items of one request's tokens that are run one after another. */
    FEW_BLOCKS = 4,
    /* Least tiles per SM for equal shares, which cost a sum over all blocks. */
    LEAST_EVEN_TILES = 64,
    /* Most blocks for equal shares, because each CTA counts the tiles of all blocks. */
    MOST_EVEN_BLOCKS = 4096,
    WORK_COST = 3, /* the time of a work item's start, in tiles */
    MOST_WAVES = 32,
};

static int64_t
count_parts(int64_t size, int64_t part)
{
    return (size + part - 1) / part;
}

/* Chooses the shape for requests of `count` tokens each. With three tokens of 64 heads each group
 * takes one, and with five or six each takes two, so that keys are read once. With other small
 * counts all groups have the same tokens and take different tiles. */
static void
choose_shape(int64_t num_heads, int64_t count, smla_logits_plan *plan)
{
    const int32_t most = (int32_t)(GROUP_COLUMNS / num_heads);
    const int64_t few = (int64_t)FEW_BLOCKS * most;
    const bool is_wide = count > few || (count > 2 * most && count <= (int64_t)NUM_GROUPS * most);
    const bool is_three = most == 2 && count == 3;
    plan->group_tokens = count == 1 || is_three ? 1 : most;
    plan->num_groups = is_wide || is_three ? NUM_GROUPS : 1;
}

/* Chooses the step from one tile of a work item to its next, for the shortest time of all waves of
 * work items. For each number of waves it tries the largest step that fits. A number of waves takes
 * at least `least` tiles per CTA and the waves' starts. */
static int32_t
choose_step(int64_t token_blocks, int64_t column_tiles, int64_t num_sms)
{
    int64_t best_step = 1;
    int64_t best_cost = INT64_MAX;
    const int64_t least = token_blocks * column_tiles / num_sms; /* least tiles per CTA */
    for (int64_t wave = 1; wave <= MOST_WAVES && least + wave * WORK_COST < best_cost; wave++) {
        const int64_t most = wave * num_sms / token_blocks;
        const int64_t step = most < 1 ? 1 : most < column_tiles ? most : column_tiles;
        const int64_t waves = count_parts(token_blocks * step, num_sms);
        const int64_t cost = waves * (count_parts(column_tiles, step) + WORK_COST);
        if (cost < best_cost) {
            best_cost = cost;
            best_step = step;
        }
    }
    return (int32_t)best_step;
}

smla_logits_plan
smla_plan_logits(int64_t num_heads, int64_t num_tokens, int64_t num_reqs, int64_t num_columns,
                 int64_t num_sms, bool can_be_even)
{
    smla_logits_plan plan = {0};
    if (num_tokens <= 0 || num_columns <= 0) {
        return plan;
    }
    const bool is_regular = num_reqs > 0 && num_tokens % num_reqs == 0;
    const int64_t reqs = is_regular ? num_reqs : 1;
    const int64_t usual = num_reqs > 0 ? count_parts(num_tokens, num_reqs) : num_tokens;
    choose_shape(num_heads, usual, &plan);
    const int64_t block_tokens = (int64_t)plan.group_tokens * plan.num_groups;
    plan.req_tokens = (int32_t)(num_tokens / reqs);
    plan.req_blocks = (int32_t)count_parts(plan.req_tokens, block_tokens);
    plan.token_blocks = (int32_t)(reqs * plan.req_blocks);
    const int64_t column_tiles = count_parts(num_columns, SMLA_LOGITS_TILE_KEYS);
    const int64_t tiles = plan.token_blocks * column_tiles;
    plan.is_even = can_be_even && block_tokens <= SMLA_LOGITS_MOST_EVEN_TOKENS &&
                   plan.token_blocks <= MOST_EVEN_BLOCKS && tiles >= LEAST_EVEN_TILES * num_sms &&
                   tiles <= INT32_MAX / 2;
    plan.step = plan.is_even ? 1 : choose_step(plan.token_blocks, column_tiles, num_sms);
    plan.num_work_items = plan.token_blocks * plan.step;
    return plan;
}
