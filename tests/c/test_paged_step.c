/* test_paged_step.c: the builder of a paged step through the public API: the arrays of every mode
 * for two requests, what it refuses, and its memory.
 */
#include "testing.h"

enum { REQS = 2, ROWS = 2, WIDTH = 12, TOKENS_PER_PAGE = 4 };

static const int32_t slots[ROWS][WIDTH] = {{8, 9, 10, 11, 0, 1, 2, 3, 20, 21, 22, 23},
                                           {4, 5, 6, 7, 12, 13, 14, 15, 0, 0, 0, 0}};

typedef struct batch {
    array *seq_lens, *pool, *req_to_token;
} batch;

static batch
make_batch(void)
{
    batch b = {ARRAY(int32, REQS), ARRAY(int64, REQS), ARRAY(int32, ROWS, WIDTH)};
    SET(b.seq_lens, 5, 0);
    SET(b.seq_lens, 9, 1);
    SET(b.pool, 1, 0);
    SET(b.pool, 0, 1);
    for (int row = 0; row < ROWS; row++) {
        for (int i = 0; i < WIDTH; i++) {
            SET(b.req_to_token, slots[row][i], row, i);
        }
    }
    return b;
}

static smla_paged_config
make_config(void)
{
    return (smla_paged_config){.struct_size = sizeof(smla_paged_config),
                               .max_bs = 4,
                               .max_num_tokens = 16,
                               .max_context_len = 9,
                               .page_size = TOKENS_PER_PAGE,
                               .num_draft_tokens = 3,
                               .speculative_num_steps = 3,
                               .device = cpu};
}

static smla_paged_build_args
make_args(const batch *b, smla_forward_mode mode)
{
    return (smla_paged_build_args){.struct_size = sizeof(smla_paged_build_args),
                                   .seq_lens = &b->seq_lens->tensor,
                                   .req_pool_indices = &b->pool->tensor,
                                   .req_to_token = &b->req_to_token->tensor,
                                   .num_reqs = REQS,
                                   .mode = mode};
}

static void
expect_ints(const int32_t *got, int64_t count, const int32_t *want)
{
    for (int64_t i = 0; i < count; i++) {
        EXPECT_EQ(got[i], want[i]);
    }
}

#define EXPECT_INTS(got, ...) \
    expect_ints(got, sizeof (int32_t[]){__VA_ARGS__} / sizeof(int32_t), (int32_t[]){__VA_ARGS__})

static void
expect_pages(const smla_paged_part *part)
{
    EXPECT_INTS(part->entries, 1, 3);
    EXPECT_INTS(part->entries + part->entries_stride, 2, 0, 5);
    EXPECT_EQ(part->columns, 3);
}

static void
test_chains(void)
{
    const smla_paged_config config = make_config();
    const smla_paged_metadata *m = NULL;
    smla_paged_builder *builder = NULL;
    const batch b = make_batch();
    EXPECT_OK(smla_paged_builder_create(&config, &builder, &error));
    EXPECT(smla_paged_builder_workspace_bytes(builder) > 0);
    smla_paged_build_args args = make_args(&b, SMLA_MODE_DECODE);
    EXPECT_OK(smla_paged_builder_build(builder, &args, &m, &error));
    EXPECT_INTS(m->requests.cu_seqlens_k, 0, 5, 14);
    EXPECT_INTS(m->requests.cu_seqlens_q, 0, 1, 2);
    expect_pages(&m->requests);
    args.mode = SMLA_MODE_TARGET_VERIFY;
    EXPECT_OK(smla_paged_builder_build(builder, &args, &m, &error));
    EXPECT_INTS(m->requests.cache_seqlens, 8, 12);
    EXPECT_INTS(m->requests.cu_seqlens_q, 0, 3, 6);
    EXPECT_EQ(m->requests.max_seq_len_k, 12);
    args.mode = SMLA_MODE_DRAFT;
    args.num_steps = 2;
    EXPECT_OK(smla_paged_builder_build(builder, &args, &m, &error));
    EXPECT_EQ(m->num_steps, 2);
    EXPECT_INTS(m->requests.cache_seqlens + m->seqlens_stride, 7, 11);
    EXPECT_INTS(m->requests.cu_seqlens_k + m->starts_stride, 0, 7, 18);
    array *const news = ARRAY(int32, REQS);
    SET(news, 2, 0);
    SET(news, 9, 1);
    args.mode = SMLA_MODE_EXTEND;
    args.extend_seq_lens = &news->tensor;
    EXPECT_OK(smla_paged_builder_build(builder, &args, &m, &error));
    EXPECT_INTS(m->requests.cu_seqlens_q, 0, 2, 11);
    EXPECT_EQ(m->requests.max_seq_len_q, 9);
    EXPECT(m->expand.entries == NULL && m->prefix.entries == NULL && m->local.seqused_k == NULL);
    smla_paged_builder_destroy(builder);
}

static void
test_trees(void)
{
    smla_paged_config config = make_config();
    const smla_paged_metadata *m = NULL;
    smla_paged_builder *builder = NULL;
    const batch b = make_batch();
    config.topk = 2;
    config.has_window = 1;
    config.sliding_window_size = 1;
    EXPECT_OK(smla_paged_builder_create(&config, &builder, &error));
    smla_paged_build_args args = make_args(&b, SMLA_MODE_DRAFT);
    array *const loc = ARRAY(int32, REQS * 2 * 3);
    for (int i = 0; i < REQS * 2 * 3; i++) {
        SET(loc, i, i);
    }
    args.out_cache_loc = &loc->tensor;
    args.spec_step = 1;
    EXPECT_OK(smla_paged_builder_build(builder, &args, &m, &error));
    EXPECT_EQ(m->expand.columns, 2);
    EXPECT_INTS(m->expand.entries + 3 * m->expand.entries_stride, 9, 10);
    EXPECT_INTS(m->swa_spec.entries, 7, 12, 0, 1); /* the end of the prefix, then two drafts */
    EXPECT_INTS(m->swa_spec.cache_seqlens, 4, 4, 4, 4);
    array *const mask = ARRAY(uint8, 3 * 8 + 3 * 12);
    for (int i = 0; i < 3 * 8 + 3 * 12; i++) { /* the first draft sees the last one alone */
        SET(mask, i == 7, i);
    }
    args.mode = SMLA_MODE_TARGET_VERIFY;
    args.custom_mask = &mask->tensor;
    EXPECT_OK(smla_paged_builder_build(builder, &args, &m, &error));
    EXPECT_INTS(m->expand.cache_seqlens, 1, 0, 0, 0, 0, 0);
    EXPECT_INTS(m->expand.entries, 15, 13, 14);
    EXPECT_EQ(m->requests.max_seq_len_q, 3);
    smla_paged_builder_destroy(builder);
}

/* What a capture fixes does not depend on lengths, and later calls write the same arrays. */
static void
test_fixed(void)
{
    smla_paged_config config = make_config();
    const smla_paged_metadata *m = NULL;
    smla_paged_builder *builder = NULL;
    const batch b = make_batch();
    array *const news = ARRAY(int32, REQS);
    SET(news, 1, 0);
    SET(news, 3, 1);
    EXPECT_OK(smla_paged_builder_create(&config, &builder, &error));
    smla_paged_build_args args = make_args(&b, SMLA_MODE_DECODE);
    args.is_fixed = 1;
    args.num_tokens = REQS;
    args.num_padding_reqs = 1;
    EXPECT_OK(smla_paged_builder_build(builder, &args, &m, &error));
    const int32_t *const table = m->requests.entries;
    EXPECT_INTS(m->requests.cache_seqlens, 5, 0);
    EXPECT_INTS(table + m->requests.entries_stride, 0);
    EXPECT_EQ(m->requests.max_seq_len_k, 12);
    EXPECT_EQ(m->requests.columns, 3);
    args.num_padding_reqs = 0;
    EXPECT_OK(smla_paged_builder_build(builder, &args, &m, &error));
    EXPECT(m->requests.entries == table);
    EXPECT_EQ(m->requests.max_seq_len_k, 12);
    expect_pages(&m->requests);
    args.mode = SMLA_MODE_DRAFT_EXTEND;
    args.extend_seq_lens = &news->tensor;
    args.num_tokens = 6;
    EXPECT_OK(smla_paged_builder_build(builder, &args, &m, &error));
    EXPECT_INTS(m->requests.cu_seqlens_q, 0, 1, 4);
    EXPECT_EQ(m->requests.max_seq_len_q, 3);
    args.num_tokens = 4;
    EXPECT_FAIL(smla_paged_builder_build(builder, &args, &m, &error), SMLA_ERROR_VALUE,
                "MetadataBuilder.build: `extend_seq_lens` must be at most the 2 tokens per request "
                "of the capture, got 3 at request 1");
    args.num_padding_reqs = 3;
    EXPECT_FAIL(smla_paged_builder_build(builder, &args, &m, &error), SMLA_ERROR_VALUE,
                "MetadataBuilder.build: `num_real_reqs` must be 0 to 2, got -1");
    args.is_fixed = 0;
    EXPECT_FAIL(smla_paged_builder_build(builder, &args, &m, &error), SMLA_ERROR_VALUE,
                "MetadataBuilder.build: `num_tokens` must be 0");
    smla_paged_builder_destroy(builder);
}

static void
test_refusals(void)
{
    smla_paged_config config = make_config();
    smla_paged_builder *builder = NULL;
    const batch b = make_batch();
    config.attention_chunk = 6;
    EXPECT_FAIL(smla_paged_builder_create(&config, &builder, &error), SMLA_ERROR_VALUE,
                "MetadataBuilder: `attention_chunk` must be a multiple of page_size = 4, got 6");
    config.attention_chunk = 0;
    EXPECT_OK(smla_paged_builder_create(&config, &builder, &error));
    smla_paged_build_args args = make_args(&b, SMLA_MODE_DECODE);
    args.mode = 0;
    EXPECT_FAIL(smla_paged_builder_build(builder, &args, NULL, &error), SMLA_ERROR_VALUE,
                "MetadataBuilder.build: `mode` must be a forward mode, got 0");
    args.mode = SMLA_MODE_DECODE;
    args.num_reqs = 5;
    EXPECT_FAIL(smla_paged_builder_build(builder, &args, NULL, &error), SMLA_ERROR_VALUE,
                "MetadataBuilder.build: `seq_lens` must be 0 to 4, got 5");
    args.num_reqs = REQS;
    args.req_pool_indices = NULL;
    EXPECT_FAIL(smla_paged_builder_build(builder, &args, NULL, &error), SMLA_ERROR_VALUE,
                "MetadataBuilder.build: `req_pool_indices` must be given, got none");
    smla_paged_builder_destroy(builder);
    config = (smla_paged_config){.struct_size = sizeof config, /* more bytes than int64 counts */
                                 .device = cpu,
                                 .max_bs = 2097151,
                                 .max_num_tokens = 8,
                                 .max_context_len = (1 << 30) - 1,
                                 .page_size = 1,
                                 .topk = 2,
                                 .num_draft_tokens = 1024,
                                 .has_window = 1,
                                 .sliding_window_size = (1 << 30) - 1};
    EXPECT_FAIL(smla_paged_builder_create(&config, &builder, &error), SMLA_ERROR_MEMORY,
                "MetadataBuilder: the tables of");
}

int
main(void)
{
    RUN(test_chains);
    RUN(test_trees);
    RUN(test_fixed);
    RUN(test_refusals);
    return report("test_paged_step");
}
