/* test_forward.c: one layer of a batch of 5 decodes and 7 prefills over 3 chunks, on every path.
 *
 * The bounds are those of attention over the cache. On path separate the gather is exact to the
 * byte (test_cache.c), so prefills have the bounds of attention over the gathered rows. These are
 * the cache's FP8 values rounded to bf16; `expected_rows` makes them.
 */
#include "reference.h"

enum {
    HEADS = 3,
    TOPK = 24,
    BLOCK = 4,
    PAGES = 120,
    MAX_LEN = 60,
    REQS = 12,
    DECODES = 5,
    PADDED = 4, /* rows of q and out past the step */
};

static const int32_t seq_lens[REQS] = {33, 2, 60, 17, 41, 30, 9, 25, 40, 12, 8, 55};
static const int32_t query_lens[REQS] = {2, 2, 2, 2, 2, 5, 9, 3, 4, 7, 8, 6};

typedef struct batch {
    int32_t starts[REQS + 1];
    int64_t num_tokens;
    array *block_table; /* [REQS, MAX_LEN / BLOCK], pages in random order */
    array *q, *topk, *out, *lse;
} batch;

static batch
make_batch(void)
{
    batch b = {.block_table = ARRAY(int32, REQS, MAX_LEN / BLOCK)};
    for (int req = 0; req < REQS; req++) {
        b.starts[req + 1] = b.starts[req] + query_lens[req];
    }
    b.num_tokens = b.starts[REQS];
    int32_t page = 0;
    for (int req = 0; req < REQS; req++) {
        for (int block = 0; block < MAX_LEN / BLOCK; block++) {
            const bool is_used = block * BLOCK < seq_lens[req];
            SET(b.block_table, is_used ? page++ * 7 % PAGES : -1, req, block);
        }
    }
    b.q = fill_normal(ARRAY(bf16, b.num_tokens + PADDED, HEADS, ROW), 0.3);
    b.topk = ARRAY(int32, b.num_tokens + PADDED, TOPK);
    for (int req = 0; req < REQS; req++) {
        for (int32_t t = b.starts[req]; t < b.starts[req + 1]; t++) {
            for (int k = 0; k < TOPK; k++) { /* causal, with duplicates and holes */
                const int32_t visible = seq_lens[req] - (b.starts[req + 1] - 1 - t);
                SET(b.topk, random_int(9) == 0 ? -1 : (double)random_int(visible), t, k);
            }
        }
    }
    b.out = ARRAY(bf16, b.num_tokens + PADDED, HEADS, NOPE);
    b.lse = ARRAY(fp32, b.num_tokens + PADDED, HEADS);
    return b;
}

/* The slots that the reference attends to, by the definition of the index conversion. */
static array *
global_indices(const batch *b)
{
    array *slots = ARRAY(int32, b->num_tokens, TOPK);
    for (int req = 0; req < REQS; req++) {
        for (int32_t t = b->starts[req]; t < b->starts[req + 1]; t++) {
            for (int k = 0; k < TOPK; k++) {
                const int64_t position = (int64_t)GET(b->topk, t, k);
                const int64_t page =
                    position < 0 ? -1 : (int64_t)GET(b->block_table, req, position / BLOCK);
                SET(slots, (double)(page < 0 ? -1 : page * BLOCK + position % BLOCK), t, k);
            }
        }
    }
    return slots;
}

static smla_builder *
build(const batch *b, int32_t kv_format, int32_t path, const array *workspace,
      const smla_metadata **metadata)
{
    const smla_builder_config config = {.struct_size = sizeof config,
                                        .num_heads = HEADS,
                                        .block_size = BLOCK,
                                        .topk_tokens = TOPK,
                                        .max_num_seqs = 16,
                                        .max_num_batched_tokens = 80,
                                        .max_model_len = MAX_LEN,
                                        .decode_threshold = 2,
                                        .prefill_workspace_tokens = 70,
                                        .kv_format = kv_format,
                                        .path = path,
                                        .device = cpu,
                                        .workspace = workspace == NULL ? NULL : &workspace->tensor};
    smla_builder *builder = NULL;
    EXPECT_OK(smla_builder_create(&config, &builder, &error));
    const smla_build_args args = {.struct_size = sizeof args,
                                  .query_start_loc_cpu = b->starts,
                                  .seq_lens_cpu = seq_lens,
                                  .block_table = &b->block_table->tensor,
                                  .num_reqs = REQS,
                                  .num_actual_tokens = b->num_tokens};
    EXPECT_OK(smla_builder_build(builder, &args, metadata, &error));
    return builder;
}

static smla_forward_args
forward_args(const batch *b, smla_builder *builder, const array *cache)
{
    return (smla_forward_args){.struct_size = sizeof(smla_forward_args),
                               .builder = builder,
                               .q = &b->q->tensor,
                               .kv_cache = &cache->tensor,
                               .topk_indices = &b->topk->tensor,
                               .out = &b->out->tensor,
                               .lse = &b->lse->tensor,
                               .softmax_scale = 0.2};
}

static array *
make_cache(DLDataType dtype)
{
    return fill_cache(ARRAY(dtype, PAGES, BLOCK, dtype.bits == 8 ? FP8_ROW : ROW));
}

/* The cache as bf16, each value rounded once. */
static array *
expected_rows(const array *cache)
{
    array *rows = ARRAY(bf16, PAGES, BLOCK, ROW);
    for (int64_t slot = 0; slot < PAGES * BLOCK; slot++) {
        for (int i = 0; i < ROW; i++) {
            SET(rows, row_value(cache, row_of(cache, slot), i), slot / BLOCK, slot % BLOCK, i);
        }
    }
    return rows;
}

/* Compares tokens [start, end) of the step with the reference over `cache`. */
static void
expect_tokens(const batch *b, const array *cache, int64_t start, int64_t end)
{
    const attention_inputs in = {.q = slice(b->q, 0, start, end, 1),
                                 .lists = {{.kv = cache,
                                            .indices = slice(global_indices(b), 0, start, end, 1)}},
                                 .softmax_scale = 0.2};
    expect_attention(&in, slice(b->out, 0, start, end, 1), slice(b->lse, 0, start, end, 1), NULL);
}

static void
expect_rest_untouched(const batch *b)
{
    const int64_t end = b->num_tokens + PADDED;
    EXPECT(is_poison(slice(b->out, 0, b->num_tokens, end, 1)));
    EXPECT(is_poison(slice(b->lse, 0, b->num_tokens, end, 1)));
}

static void
test_one_call_paths(void)
{
    static const int32_t paths[] = {SMLA_PATH_MIXED, SMLA_PATH_DIRECT, SMLA_PATH_BF16};
    for (int i = 0; i < 3; i++) {
        const batch b = make_batch();
        const bool fp8 = paths[i] != SMLA_PATH_BF16;
        const array *cache = make_cache(fp8 ? uint8 : bf16);
        const smla_metadata *m = NULL;
        smla_builder *builder =
            build(&b, fp8 ? SMLA_KV_FP8_DS_MLA : SMLA_KV_BFLOAT16, paths[i], NULL, &m);
        EXPECT_EQ((int)m->path, paths[i]);
        EXPECT_EQ(m->split.num_decodes, DECODES);
        const smla_forward_args args = forward_args(&b, builder, cache);
        EXPECT_OK(smla_forward(&args, &error));
        expect_tokens(&b, cache, 0, b.num_tokens);
        expect_rest_untouched(&b);
        smla_builder_destroy(builder);
        free_arrays("test_one_call_paths");
    }
}

/* With the builder's workspace, and with one of the caller's that has gaps behind its rows. */
static void
test_separate(void)
{
    for (int i = 0; i < 2; i++) {
        const batch b = make_batch();
        const array *cache = make_cache(uint8);
        array *buffer = ARRAY(bf16, 75, ROW + 8);
        const array *workspace = i == 0 ? NULL : slice(buffer, 1, 0, ROW, 1);
        const smla_metadata *m = NULL;
        smla_builder *builder = build(&b, SMLA_KV_FP8_DS_MLA, SMLA_PATH_SEPARATE, workspace, &m);
        EXPECT_EQ(m->split.num_decodes, DECODES);
        EXPECT_EQ(m->split.num_prefills, REQS - DECODES);
        EXPECT_EQ(m->decode_query_len, 2);
        EXPECT_EQ(m->num_chunks, 3); /* 30 + 9 + 25, 40 + 12 + 8, 55 */
        const smla_forward_args args = forward_args(&b, builder, cache);
        EXPECT_OK(smla_forward(&args, &error));
        expect_tokens(&b, cache, 0, b.starts[DECODES]);
        expect_tokens(&b, expected_rows(cache), b.starts[DECODES], b.num_tokens);
        expect_rest_untouched(&b);
        if (i == 1) {
            EXPECT(!is_poison(slice(workspace, 0, 0, 55, 1)));
            EXPECT(is_poison(slice(workspace, 0, 70, 75, 1)));
            EXPECT(is_poison(slice(buffer, 1, ROW, ROW + 8, 1)));
        }
        smla_builder_destroy(builder);
        free_arrays("test_separate");
    }
}

/* The same step with q as a pair, whose tokens lie backwards in memory, gives the same bits. */
static void
test_strided_query(void)
{
    batch b = make_batch();
    const array *cache = make_cache(uint8);
    const smla_metadata *m = NULL;
    smla_builder *builder = build(&b, SMLA_KV_FP8_DS_MLA, SMLA_PATH_SEPARATE, NULL, &m);
    smla_forward_args args = forward_args(&b, builder, cache);
    EXPECT_OK(smla_forward(&args, &error));
    const int64_t rows = b.num_tokens + PADDED;
    array *backwards = slice(ARRAY(bf16, rows, HEADS, ROW), 0, 0, rows, -1);
    for (int64_t t = 0; t < rows; t++) {
        memcpy(AT(backwards, t, 0, 0), AT(b.q, t, 0, 0), HEADS * ROW * sizeof(uint16_t));
    }
    const array *out = b.out;
    b.out = ARRAY(bf16, rows, HEADS, NOPE);
    args = forward_args(&b, builder, cache);
    args.q = &slice(backwards, 2, 0, NOPE, 1)->tensor;
    args.q_pe = &slice(backwards, 2, NOPE, ROW, 1)->tensor;
    EXPECT_OK(smla_forward(&args, &error));
    EXPECT(memcmp(b.out->tensor.data, out->tensor.data, out->bytes) == 0);
    smla_builder_destroy(builder);
}

/* A step padded for a graph: tokens that belong to no request, whose indices are -1. */
static void
test_padded_tokens(void)
{
    const batch b = make_batch();
    const array *cache = make_cache(uint8);
    const smla_metadata *m = NULL;
    smla_builder *builder = build(&b, SMLA_KV_FP8_DS_MLA, SMLA_PATH_SEPARATE, NULL, &m);
    const smla_build_args padded = {.struct_size = sizeof padded,
                                    .query_start_loc_cpu = b.starts,
                                    .seq_lens_cpu = seq_lens,
                                    .block_table = &b.block_table->tensor,
                                    .num_reqs = REQS,
                                    .num_actual_tokens = b.num_tokens + 2};
    EXPECT_OK(smla_builder_build(builder, &padded, &m, &error));
    fill(slice(b.topk, 0, b.num_tokens, b.num_tokens + 2, 1), -1.0);
    const smla_forward_args args = forward_args(&b, builder, cache);
    EXPECT_OK(smla_forward(&args, &error));
    for (int64_t t = b.num_tokens; t < b.num_tokens + 2; t++) {
        EXPECT_NEAR(GET(b.lse, t, 0), -INFINITY, 0.0);
        EXPECT_NEAR(GET(b.out, t, HEADS - 1, NOPE - 1), 0.0, 0.0);
    }
    smla_builder_destroy(builder);
}

static void
test_errors(void)
{
    const batch b = make_batch();
    array *cache = make_cache(uint8);
    const smla_metadata *m = NULL;
    smla_builder *builder = build(&b, SMLA_KV_FP8_DS_MLA, SMLA_PATH_SEPARATE, NULL, &m);
    const smla_forward_args good = forward_args(&b, builder, cache);
    smla_forward_args bad = good;
#define EXPECT_REFUSED(status, part)                       \
    EXPECT_FAIL(smla_forward(&bad, &error), status, part); \
    bad = good
    bad.builder = NULL;
    EXPECT_REFUSED(SMLA_ERROR_VALUE, "forward: `builder` must have built a step, got none");
    bad.q = NULL;
    EXPECT_REFUSED(SMLA_ERROR_VALUE, "forward: `q` must be given, got none");
    bad.q = &slice(b.q, 0, 0, b.num_tokens - 1, 1)->tensor;
    EXPECT_REFUSED(SMLA_ERROR_VALUE, "`q` must have shape [>= 52, 3, 576], got [51, 3, 576]");
    bad.q_pe = &ARRAY(fp32, 60, HEADS, ROPE)->tensor;
    EXPECT_REFUSED(SMLA_ERROR_VALUE, "`q[0]` must have shape [>= 52, 3, 512], got [56, 3, 576]");
    bad.kv_cache = &ARRAY(uint8, PAGES, BLOCK + 1, FP8_ROW)->tensor;
    EXPECT_REFUSED(SMLA_ERROR_VALUE, "`kv_cache` must have pages of block_size = 4 tokens, got 5");
    bad.kv_cache = &ARRAY(bf16, PAGES, BLOCK, ROW)->tensor;
    EXPECT_REFUSED(SMLA_ERROR_TYPE, "for format fp8_ds_mla, got bfloat16");
    bad.topk_indices = &ARRAY(int32, 57, TOPK + 1)->tensor;
    EXPECT_REFUSED(SMLA_ERROR_VALUE,
                   "`topk_indices` must have at most topk_tokens = 24 columns, got 25");
    bad.lse = bad.out;
    EXPECT_REFUSED(SMLA_ERROR_TYPE, "`lse` must be float32, got bfloat16");
    bad.out = &slice(b.q, 2, 0, NOPE, 1)->tensor;
    EXPECT_REFUSED(SMLA_ERROR_VALUE, "`out` must not overlap `q`");
    bad.softmax_scale = NAN;
    EXPECT_REFUSED(SMLA_ERROR_VALUE, "`softmax_scale` must be finite, got");
    SET(b.block_table, PAGES, DECODES, 0); /* found before any attention runs */
    EXPECT_REFUSED(SMLA_ERROR_VALUE,
                   "`block_table` must name pages of the cache (0 to 119), got 120");
#undef EXPECT_REFUSED
    smla_builder_destroy(builder);
}

/* A step without tokens writes nothing. */
static void
test_empty_step(void)
{
    const batch b = make_batch();
    const array *cache = make_cache(uint8);
    smla_builder *builder = build(&b, SMLA_KV_FP8_DS_MLA, SMLA_PATH_MIXED, NULL, NULL);
    const int32_t zero = 0;
    const smla_build_args none = {.struct_size = sizeof none,
                                  .query_start_loc_cpu = &zero,
                                  .block_table = &b.block_table->tensor};
    EXPECT_OK(smla_builder_build(builder, &none, NULL, &error));
    const smla_forward_args args = forward_args(&b, builder, cache);
    EXPECT_OK(smla_forward(&args, &error));
    EXPECT(is_poison(b.out));
    smla_builder_destroy(builder);
}

int
main(void)
{
    RUN(test_one_call_paths);
    RUN(test_separate);
    RUN(test_strided_query);
    RUN(test_padded_tokens);
    RUN(test_errors);
    RUN(test_empty_step);
    return report("test_forward");
}
