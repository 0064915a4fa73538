/* test_cuda_logits.c: how csrc/cuda/indexer/logits_plan.c cuts calls into work items, for devices
 * that the machine need not have. Every token must be in one block, whose tokens are of one
 * request, and every tile of a block in one work item.
 */
#include "cuda/indexer/logits_plan.c" // NOLINT(bugprone-suspicious-include)

#include "testing.h"

enum { H200_SMS = 132 };

static int64_t
least(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

/* ---- Blocks -------------------------------------------------------------------------------- */

/* Goes through the blocks as the kernel does, for requests with `count` tokens each. */
static void
expect_blocks(int64_t num_heads, int64_t num_reqs, int64_t count)
{
    const int64_t num_tokens = num_reqs * count;
    const smla_logits_plan plan =
        smla_plan_logits(num_heads, num_tokens, num_reqs, 32768, H200_SMS, true);
    const int64_t block_tokens = (int64_t)plan.group_tokens * plan.num_groups;
    int64_t next = 0; /* the first token that no block has had */
    EXPECT_EQ(plan.req_tokens, count);
    for (int64_t block = 0; block < plan.token_blocks; block++) {
        const int64_t req = block / plan.req_blocks;
        const int64_t first = req * plan.req_tokens + block % plan.req_blocks * block_tokens;
        const int64_t end = least(first + block_tokens, (req + 1) * plan.req_tokens);
        EXPECT_EQ(first, next);
        EXPECT(end > first);
        EXPECT((end - 1) / count == first / count); /* one request */
        next = end;
    }
    EXPECT_EQ(next, num_tokens);
    EXPECT(plan.group_tokens * num_heads <= 128);
}

static void
test_blocks(void)
{
    static const int64_t reqs[] = {1, 2, 3, 7, 64, 128, 200};
    for (int i = 0; i < (int)(sizeof reqs / sizeof reqs[0]); i++) {
        for (int64_t count = 1; count <= 40; count++) {
            expect_blocks(32, reqs[i], count);
            expect_blocks(64, reqs[i], count);
        }
    }
    expect_blocks(64, 1, 4096);
    expect_blocks(64, 5, 1001);
}

/* Tokens per warpgroup, groups and blocks of a request, by heads and tokens per request. */
static void
test_shapes(void)
{
    static const struct {
        int heads, count, group_tokens, num_groups, req_blocks;
    } rows[] = {
        {64, 1, 1, 1, 1},  {64, 2, 2, 1, 1},  {64, 3, 1, 3, 1},  {64, 4, 2, 1, 2},
        {64, 5, 2, 3, 1},  {64, 6, 2, 3, 1},  {64, 7, 2, 1, 4},  {64, 8, 2, 1, 4},
        {64, 9, 2, 3, 2},  {64, 13, 2, 3, 3}, {32, 1, 1, 1, 1},  {32, 2, 4, 1, 1},
        {32, 3, 4, 1, 1},  {32, 4, 4, 1, 1},  {32, 5, 4, 1, 2},  {32, 8, 4, 1, 2},
        {32, 9, 4, 3, 1},  {32, 12, 4, 3, 1}, {32, 13, 4, 1, 4}, {32, 16, 4, 1, 4},
        {32, 17, 4, 3, 2},
    };
    for (int i = 0; i < (int)(sizeof rows / sizeof rows[0]); i++) {
        const smla_logits_plan plan =
            smla_plan_logits(rows[i].heads, 64 * rows[i].count, 64, 32768, H200_SMS, true);
        EXPECT_EQ(plan.group_tokens, rows[i].group_tokens);
        EXPECT_EQ(plan.num_groups, rows[i].num_groups);
        EXPECT_EQ(plan.req_blocks, rows[i].req_blocks);
    }
}

/* Where requests cannot have equally many tokens, all tokens are cut as those of one request. The
 * shape is that of the mean, rounded up. */
static void
test_irregular(void)
{
    const smla_logits_plan plan = smla_plan_logits(64, 131, 64, 32768, H200_SMS, true);
    EXPECT_EQ(plan.req_tokens, 131);
    EXPECT_EQ(plan.group_tokens, 1);
    EXPECT_EQ(plan.num_groups, 3);
    EXPECT_EQ(plan.token_blocks, 44);
    const smla_logits_plan few = smla_plan_logits(64, 3, 64, 32768, H200_SMS, true);
    EXPECT_EQ(few.req_tokens, 3);
    EXPECT_EQ(few.group_tokens, 1);
    EXPECT_EQ(few.token_blocks, 3);
    const smla_logits_plan flat = smla_plan_logits(64, 100, 0, 32768, H200_SMS, true);
    EXPECT_EQ(flat.req_tokens, 100);
    EXPECT_EQ(flat.num_groups, 3);
}

/* ---- Work items ---------------------------------------------------------------------------- */

static int64_t
cost_of(int64_t step, int64_t blocks, int64_t tiles)
{
    return count_parts(blocks * step, H200_SMS) * (count_parts(tiles, step) + WORK_COST);
}

/* The step is the best of all that take few enough waves. */
static void
expect_step(int64_t num_reqs, int64_t num_columns)
{
    const smla_logits_plan plan =
        smla_plan_logits(64, num_reqs, num_reqs, num_columns, H200_SMS, false);
    const int64_t tiles = count_parts(num_columns, SMLA_LOGITS_TILE_KEYS);
    EXPECT(!plan.is_even);
    EXPECT(plan.step >= 1 && plan.step <= tiles);
    EXPECT_EQ(plan.num_work_items, plan.token_blocks * plan.step);
    for (int64_t step = 2; step <= tiles; step++) {
        if (plan.token_blocks * step <= MOST_WAVES * H200_SMS) {
            EXPECT(cost_of(plan.step, plan.token_blocks, tiles) <=
                   cost_of(step, plan.token_blocks, tiles));
        }
    }
}

static void
test_steps(void)
{
    for (int64_t num_reqs = 1; num_reqs <= 300; num_reqs += 1 + num_reqs / 8) {
        for (int64_t num_columns = 1; num_columns <= 40000; num_columns += 1 + num_columns / 3) {
            expect_step(num_reqs, num_columns);
        }
    }
    const smla_logits_plan one = smla_plan_logits(64, 1, 1, 32768, H200_SMS, true);
    EXPECT_EQ(one.step, 132); /* three or four tiles for each CTA */
    const smla_logits_plan prefill = smla_plan_logits(64, 4096, 1, 32768, H200_SMS, true);
    EXPECT_EQ(prefill.step, 4); /* 683 blocks: 6 waves, or 21 of work items a quarter as long */
    const smla_logits_plan longer = smla_plan_logits(64, 1, 1, 131072, H200_SMS, true);
    EXPECT_EQ(longer.step, 132);
}

/* Equal shares need the blocks of a decode, many tiles per SM, and blocks that a CTA can count. */
static void
test_even(void)
{
    EXPECT(smla_plan_logits(64, 64, 64, 32768, H200_SMS, true).is_even);
    EXPECT(smla_plan_logits(64, 192, 64, 32768, H200_SMS, true).is_even);  /* 3 tokens per block */
    EXPECT(smla_plan_logits(32, 128, 64, 32768, H200_SMS, true).is_even);  /* 4 */
    EXPECT(!smla_plan_logits(64, 320, 64, 32768, H200_SMS, true).is_even); /* 6 */
    EXPECT(!smla_plan_logits(64, 2048, 1, 8192, H200_SMS, true).is_even);
    EXPECT(!smla_plan_logits(64, 64, 64, 32768, H200_SMS, false).is_even);
    EXPECT(!smla_plan_logits(64, 1, 1, 131072, H200_SMS, true).is_even);
    EXPECT(!smla_plan_logits(64, 3, 3, 131072, H200_SMS, true).is_even);
    const int64_t most = MOST_EVEN_BLOCKS;
    EXPECT(smla_plan_logits(64, most, most, 8192, H200_SMS, true).is_even);
    EXPECT(!smla_plan_logits(64, most + 1, most + 1, 8192, H200_SMS, true).is_even);
    EXPECT(!smla_plan_logits(64, 256, 256, 1 << 29, H200_SMS, true).is_even); /* 2^31 tiles */
    EXPECT_EQ(smla_plan_logits(64, 64, 64, 32768, H200_SMS, true).step, 1);
}

static void
test_nothing(void)
{
    EXPECT_EQ(smla_plan_logits(64, 0, 0, 32768, H200_SMS, true).num_work_items, 0);
    EXPECT_EQ(smla_plan_logits(64, 4, 1, 0, H200_SMS, true).num_work_items, 0);
}

int
main(void)
{
    RUN(test_blocks);
    RUN(test_shapes);
    RUN(test_irregular);
    RUN(test_steps);
    RUN(test_even);
    RUN(test_nothing);
    return report("test_cuda_logits");
}
