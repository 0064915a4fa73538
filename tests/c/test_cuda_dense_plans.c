/* test_cuda_dense_plans.c: the splits of dense calls on CUDA's portable kernels, for devices that
 * the machine need not have. The lengths are on the device, so splits follow from tokens alone: as
 * many as fill two waves of CTAs, one at least and SMLA_MAX_SPLITS at most. The workspace that a
 * caller asks for once holds the partial rows of every such call of as many tokens or fewer.
 */
#include "cuda/attention/table/kernels.c"  // NOLINT(bugprone-suspicious-include)
#include "cuda/attention/table/schedule.c" // NOLINT(bugprone-suspicious-include)
#include "cuda/attention/table/widen.c"    // NOLINT(bugprone-suspicious-include)

#include "fake_cuda/launchers.h"

enum { WAVES = 2, MOST_TOKENS = 400 };

static smla_attention_shape
make_shape(int format, int64_t tokens, int64_t heads)
{
    return (smla_attention_shape){.num_tokens = tokens,
                                  .num_heads = heads,
                                  .topk = 4096,
                                  .formats = {&smla_kv_formats[format]},
                                  .source = SMLA_KEYS_TABLE,
                                  .needs = SMLA_NEEDS_SOFTCAP};
}

/* Pairs of token and split whose CTAs fill the waves. */
static int64_t
count_parts(const smla_attention_kernel *kernel, int64_t heads)
{
    const int64_t tiles = (heads + kernel->heads_per_cta - 1) / kernel->heads_per_cta;
    return WAVES * count_resident_ctas(&devices[0], kernel) / tiles;
}

static void
check_tokens(int format, int64_t heads, int64_t *num_at_limit)
{
    for (int64_t tokens = 1; tokens <= MOST_TOKENS; tokens++) {
        const smla_attention_shape shape = make_shape(format, tokens, heads);
        smla_attention_shape largest = shape;
        largest.source = SMLA_KEYS_LISTS;
        largest.needs = 0;
        largest.covers_tables = true;
        largest.topk = SMLA_SPLIT_ALIGN; /* too few keys for splits in other calls */
        smla_attention_plan plan;
        smla_cuda_plan_attention(&shape, &plan);
        const int64_t splits = plan.runs[0].num_splits;
        EXPECT_EQ(plan.num_runs, 1);
        EXPECT_EQ(plan.runs[0].num_tokens, tokens);
        EXPECT(plan.runs[0].kernel != NULL);
        if (plan.runs[0].kernel == NULL) {
            return;
        }
        const int64_t parts = count_parts(plan.runs[0].kernel, heads);
        EXPECT(splits >= 1 && splits <= SMLA_MAX_SPLITS);
        EXPECT(splits == 1 || tokens * splits <= parts);
        EXPECT(splits == SMLA_MAX_SPLITS || tokens * (splits + 1) > parts);
        EXPECT_EQ(plan.workspace_bytes > 0, splits > 1);
        EXPECT(plan.workspace_bytes <= smla_cuda_attention_workspace_size(&largest));
        *num_at_limit += tokens * SMLA_MAX_SPLITS < parts;
    }
}

/* Devices on which few tokens would have more splits than there may be, just as many, and fewer. */
static void
test_splits_of_dense_calls(void)
{
    static const int64_t heads[] = {1, 15, 16, 17, 64, 65, 128};
    static const int sms[] = {1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 132, 160};
    static const int formats[] = {SMLA_ROW_BFLOAT16, SMLA_ROW_FP8_DS_MLA};
    int64_t num_at_limit = 0;
    for (size_t s = 0; s < sizeof sms / sizeof sms[0]; s++) {
        devices[0] = a100;
        devices[0].num_sms = sms[s];
        for (size_t h = 0; h < sizeof heads / sizeof heads[0]; h++) {
            check_tokens(formats[0], heads[h], &num_at_limit);
            check_tokens(formats[1], heads[h], &num_at_limit);
        }
    }
    EXPECT(num_at_limit > 0);
}

int
main(void)
{
    RUN(test_splits_of_dense_calls);
    return report("test_cuda_dense_plans");
}
