/* test_plan.c: splitting and chunking with the contract's test vectors, and the metadata that a
 * builder makes on every path.
 */
#include "testing.h"

/* ---- Splitting ----------------------------------------------------------------------------- */

/* Query lengths -> query_start_loc. */
static const int32_t *
starts_of(int count, const int64_t *lens)
{
    array *a = ARRAY(int32, count + 1);
    int32_t *starts = a->tensor.data;
    starts[0] = 0;
    for (int i = 0; i < count; i++) {
        starts[i + 1] = (int32_t)(starts[i] + lens[i]);
    }
    return starts;
}

#define STARTS(...) starts_of(COUNT(__VA_ARGS__), (int64_t[]){__VA_ARGS__})

static void
expect_split(const int32_t *starts, int64_t num_reqs, int64_t tokens, int64_t threshold,
             int uniform, smla_batch_split wanted)
{
    smla_batch_split split = {-1, -1, -1, -1};
    EXPECT_OK(smla_split_decodes_and_prefills(starts, num_reqs, tokens, threshold, uniform, &split,
                                              &error));
    EXPECT_EQ(split.num_decodes, wanted.num_decodes);
    EXPECT_EQ(split.num_prefills, wanted.num_prefills);
    EXPECT_EQ(split.num_decode_tokens, wanted.num_decode_tokens);
    EXPECT_EQ(split.num_prefill_tokens, wanted.num_prefill_tokens);
}

static void
test_split(void)
{
    expect_split(STARTS(2, 2, 1, 3, 2, 1, 2), 7, 13, 3, 1, (smla_batch_split){2, 5, 4, 9});
    expect_split(STARTS(2, 1, 3, 4, 5, 6, 7, 8), 8, 36, 4, 0, (smla_batch_split){4, 4, 10, 26});
    expect_split(STARTS(2, 2, 2, 0), 4, 8, 3, 1, (smla_batch_split){4, 0, 8, 0});
    expect_split(STARTS(1, 1, 1), 3, 3, 1, 1, (smla_batch_split){3, 0, 3, 0});
    expect_split(STARTS(3, 1, 2), 3, 6, 3, 0, (smla_batch_split){3, 0, 6, 0});
    expect_split(STARTS(4, 5), 2, 9, 3, 1, (smla_batch_split){0, 2, 0, 9});
    expect_split(STARTS(1, 9), 2, 16, 1, 1, (smla_batch_split){1, 1, 1, 15}); /* padding tokens */
    expect_split(STARTS(0, 0), 2, 0, 1, 1, (smla_batch_split){2, 0, 0, 0});
    expect_split(STARTS(2, 0, 2), 3, 4, 3, 1, (smla_batch_split){3, 0, 4, 0});
    expect_split(STARTS(9, 0), 2, 9, 3, 1, (smla_batch_split){0, 2, 0, 9});
    expect_split(STARTS(0, 9), 2, 9, 3, 1, (smla_batch_split){1, 1, 0, 9});
    expect_split(STARTS(0, 2, 0, 1, 0), 5, 3, 3, 1, (smla_batch_split){3, 2, 2, 1});
    expect_split((int32_t[]){0}, 0, 0, 1, 1, (smla_batch_split){0, 0, 0, 0});
}

static void
test_split_errors(void)
{
    static const char op[] = "split_decodes_and_prefills: ";
    smla_batch_split s;
    EXPECT_FAIL(smla_split_decodes_and_prefills(STARTS(1), 1, 1, 0, 1, &s, &error),
                SMLA_ERROR_VALUE, "`decode_threshold` must be at least 1, got 0");
    EXPECT(strncmp(error.text, op, sizeof op - 1) == 0);
    EXPECT_FAIL(smla_split_decodes_and_prefills(NULL, 1, 1, 1, 1, &s, &error), SMLA_ERROR_VALUE,
                "`query_start_loc` must");
    EXPECT_FAIL(smla_split_decodes_and_prefills((int32_t[]){1, 2}, 1, 2, 1, 1, &s, &error),
                SMLA_ERROR_VALUE, "`query_start_loc` must start with 0, got 1");
    EXPECT_FAIL(smla_split_decodes_and_prefills(STARTS(3, -1), 2, 3, 1, 1, &s, &error),
                SMLA_ERROR_VALUE, "must not decrease, got 2 after 3 at request 1");
    EXPECT_FAIL(smla_split_decodes_and_prefills(STARTS(2, 2), 2, 3, 2, 1, &s, &error),
                SMLA_ERROR_VALUE,
                "`num_actual_tokens` must be at least query_start_loc[-1] = 4, got 3");
    EXPECT_FAIL(smla_split_decodes_and_prefills(STARTS(1), -1, 1, 1, 1, &s, &error),
                SMLA_ERROR_VALUE, "`num_reqs` must be");
}

static void
test_order(void)
{
    static const int32_t lens[] = {1, 1, 374, 300, 1, 256, 1, 27, 1};
    static const int64_t wanted[] = {2, 8, 3, 6};
    int64_t swaps[9];
    int64_t num_swaps = -1;
    smla_batch_split s;
    EXPECT_OK(smla_reorder_batch(lens, 9, 1, swaps, &num_swaps, &s, &error));
    EXPECT_EQ(num_swaps, 2);
    EXPECT(memcmp(swaps, wanted, sizeof wanted) == 0);
    EXPECT(s.num_decodes == 5 && s.num_prefills == 4 && s.num_decode_tokens == 5);
    EXPECT_EQ(s.num_prefill_tokens, 957);
    EXPECT_OK(smla_reorder_batch(NULL, 0, 1, NULL, &num_swaps, &s, &error));
    EXPECT_EQ(num_swaps, 0);
    EXPECT_FAIL(smla_reorder_batch(NULL, 1, 1, swaps, &num_swaps, &s, &error), SMLA_ERROR_VALUE,
                "reorder_batch: `num_scheduled_tokens` must be given");
    EXPECT_FAIL(smla_reorder_batch(lens, 9, 1, NULL, &num_swaps, &s, &error), SMLA_ERROR_VALUE,
                "`swaps` must be given");
    EXPECT_FAIL(smla_reorder_batch(lens, 9, 1, swaps, NULL, &s, &error), SMLA_ERROR_VALUE,
                "`num_swaps` must be given");
    EXPECT_FAIL(smla_reorder_batch(lens, 9, 1, swaps, &num_swaps, NULL, &error), SMLA_ERROR_VALUE,
                "`split` must be given");
    EXPECT_FAIL(smla_reorder_batch(lens, 9, 0, swaps, &num_swaps, &s, &error), SMLA_ERROR_VALUE,
                "`decode_threshold` must be at least 1, got 0");
    EXPECT_FAIL(smla_reorder_batch((int32_t[]){5, -2}, 2, 1, swaps, &num_swaps, &s, &error),
                SMLA_ERROR_VALUE, "`num_scheduled_tokens` must be >= 0, got -2 at request 1");
}

static void
expect_chunks(int64_t num_reqs, const int32_t *lens, int64_t room, int64_t count,
              const int64_t *wanted)
{
    int64_t ends[8] = {0};
    int64_t num_chunks = -1;
    EXPECT_OK(smla_split_prefill_chunks(lens, num_reqs, room, ends, &num_chunks, &error));
    EXPECT_EQ(num_chunks, count);
    for (int64_t i = 0; i < count; i++) {
        EXPECT_EQ(ends[i], wanted[i]);
    }
}

static void
test_chunks(void)
{
    const int32_t lens[] = {10, 15, 20, 5};
    expect_chunks(4, lens, 25, 2, (int64_t[]){2, 4});
    expect_chunks(4, lens, 50, 1, (int64_t[]){4});
    expect_chunks(4, lens, 20, 4, (int64_t[]){1, 2, 3, 4});
    expect_chunks(1, lens, 10, 1, (int64_t[]){1});
    expect_chunks(0, NULL, 10, 0, NULL);
    expect_chunks(3, (int32_t[]){0, 0, 7}, 7, 1, (int64_t[]){3});
    int64_t ends[4];
    int64_t count;
    EXPECT_FAIL(
        smla_split_prefill_chunks(lens, 4, 19, ends, &count, &error), SMLA_ERROR_VALUE,
        "split_prefill_chunks: `seq_lens` must fit the workspace of 19 tokens one by one, got 20 "
        "at request 2");
    EXPECT_FAIL(smla_split_prefill_chunks((int32_t[]){-1}, 1, 19, ends, &count, &error),
                SMLA_ERROR_VALUE, "`seq_lens` must be >= 0, got -1 at request 0");
    EXPECT_EQ(smla_prefill_workspace_size(4096), 5 * 4096);
}

/* ---- Building ------------------------------------------------------------------------------ */

static smla_builder_config
make_config(int64_t num_heads, int32_t kv_format, int32_t path)
{
    return (smla_builder_config){.struct_size = sizeof(smla_builder_config),
                                 .num_heads = num_heads,
                                 .block_size = 8,
                                 .topk_tokens = 16,
                                 .max_num_seqs = 8,
                                 .max_num_batched_tokens = 64,
                                 .max_model_len = 40,
                                 .kv_format = kv_format,
                                 .path = path,
                                 .device = cpu};
}

static smla_builder *
create(const smla_builder_config *config)
{
    smla_builder *builder = NULL;
    EXPECT_OK(smla_builder_create(config, &builder, &error));
    if (builder == NULL) {
        exit(2);
    }
    return builder;
}

static smla_build_args
make_build(int64_t num_reqs, const int32_t *starts, const int32_t *seq_lens, int64_t tokens)
{
    const array *table = ARRAY(int32, 8, 5);
    return (smla_build_args){.struct_size = sizeof(smla_build_args),
                             .query_start_loc_cpu = starts,
                             .seq_lens_cpu = seq_lens,
                             .block_table = &table->tensor,
                             .num_reqs = num_reqs,
                             .num_actual_tokens = tokens};
}

static void
test_path(void)
{
    static const struct {
        int64_t heads;
        int32_t format, asked, taken;
    } cases[] = {
        {31, SMLA_KV_FP8_DS_MLA, SMLA_PATH_AUTO, SMLA_PATH_MIXED},
        {32, SMLA_KV_FP8_DS_MLA, SMLA_PATH_AUTO, SMLA_PATH_SEPARATE},
        {128, SMLA_KV_FP8_DS_MLA, SMLA_PATH_MIXED, SMLA_PATH_MIXED},
        {1, SMLA_KV_FP8_DS_MLA, SMLA_PATH_DIRECT, SMLA_PATH_DIRECT},
        {128, SMLA_KV_BFLOAT16, SMLA_PATH_AUTO, SMLA_PATH_BF16},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        const smla_builder_config config =
            make_config(cases[i].heads, cases[i].format, cases[i].asked);
        smla_builder *builder = create(&config);
        const smla_build_args args = make_build(1, STARTS(1), (int32_t[]){1}, 1);
        const smla_metadata *m = NULL;
        EXPECT_OK(smla_builder_build(builder, &args, &m, &error));
        EXPECT_EQ((int)m->path, cases[i].taken);
        const bool is_separate = cases[i].taken == SMLA_PATH_SEPARATE;
        EXPECT_EQ(smla_builder_workspace_bytes(builder), is_separate ? 5 * 40 * 1152 : 0);
        smla_builder_destroy(builder);
    }
    EXPECT(strcmp(smla_path_name(SMLA_PATH_SEPARATE), "separate") == 0);
    EXPECT(smla_path_name((smla_path)99) == NULL);
    smla_builder_destroy(NULL);
}

/* The contract's test vector of chunks, in which workspace starts count from 0, behind a decode. */
static void
test_separate_metadata(void)
{
    smla_builder_config config = make_config(32, SMLA_KV_FP8_DS_MLA, SMLA_PATH_AUTO);
    config.prefill_workspace_tokens = 40;
    smla_builder *builder = create(&config);
    const int32_t seq_lens[] = {33, 10, 15, 20, 5};
    smla_build_args args = make_build(5, STARTS(1, 3, 2, 4, 5), seq_lens, 17);
    const smla_metadata *m = NULL;
    EXPECT_OK(smla_builder_build(builder, &args, &m, &error));
    EXPECT_EQ(m->num_reqs, 5);
    EXPECT_EQ(m->split.num_decodes, 1);
    EXPECT_EQ(m->split.num_prefill_tokens, 16);
    EXPECT_EQ(m->decode_query_len, 1);
    EXPECT_EQ(m->num_chunks, 2);
    const smla_prefill_chunk wanted[] = {{0, 2, 1, 6, 25}, {2, 4, 6, 15, 25}};
    EXPECT(memcmp(m->chunks, wanted, sizeof wanted) == 0);
    const int32_t starts[] = {0, 10, 0, 20};
    EXPECT(memcmp(m->prefill_workspace_starts, starts, sizeof starts) == 0);
    EXPECT(memcmp(m->prefill_seq_lens, seq_lens + 1, 4 * sizeof(int32_t)) == 0);
    const int32_t ids[] = {-1, 0, 0, 0, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3, 3, -1, -1};
    EXPECT(memcmp(m->prefill_request_ids, ids, sizeof ids) == 0);
    const int32_t reqs[] = {0, 1, 1, 1, 2, 2, 3, 3, 3, 3, 4, 4, 4, 4, 4, 0, 0};
    EXPECT(memcmp(m->req_id_per_token, reqs, sizeof reqs) == 0);
    for (int t = 17; t < 64; t++) {
        EXPECT_EQ(m->req_id_per_token[t], 0); /* zero behind the step, to the end of the buffer */
    }
    /* A smaller step in the same buffers: nothing of the last step is left. */
    const int32_t *ids_before = m->req_id_per_token;
    args = make_build(2, STARTS(2, 2), (int32_t[]){40, 9}, 4);
    EXPECT_OK(smla_builder_build(builder, &args, &m, &error));
    EXPECT(m->req_id_per_token == ids_before);
    EXPECT_EQ(m->split.num_decodes, 0);
    EXPECT_EQ(m->decode_query_len, 0);
    EXPECT_EQ(m->num_chunks, 2);
    EXPECT_EQ(m->prefill_request_ids[0], 0);
    for (int t = 4; t < 64; t++) {
        EXPECT_EQ(m->req_id_per_token[t], 0);
    }
    smla_builder_destroy(builder);
}

/* The contract's vector of chunks with requests without a query among its requests, as long as the
 * model allows: they take no rows of the workspace and change no chunk of the others. */
static void
test_idle_requests(void)
{
    smla_builder_config config = make_config(32, SMLA_KV_FP8_DS_MLA, SMLA_PATH_AUTO);
    config.prefill_workspace_tokens = 40;
    smla_builder *builder = create(&config);
    const int32_t lens[] = {40, 33, 10, 40, 15, 20, 40, 5};
    smla_build_args args = make_build(8, STARTS(0, 1, 3, 0, 2, 4, 0, 5), lens, 15);
    const smla_metadata *m = NULL;
    EXPECT_OK(smla_builder_build(builder, &args, &m, &error));
    EXPECT_EQ(m->split.num_decodes, 2);
    EXPECT_EQ(m->split.num_prefills, 6);
    EXPECT_EQ(m->split.num_decode_tokens, 1);
    EXPECT_EQ(m->decode_query_len, 1);
    EXPECT_EQ(m->num_chunks, 2);
    const smla_prefill_chunk wanted[] = {{0, 3, 1, 6, 25}, {3, 6, 6, 15, 25}};
    EXPECT(memcmp(m->chunks, wanted, sizeof wanted) == 0);
    const int32_t starts[] = {0, 10, 10, 0, 20, 20};
    EXPECT(memcmp(m->prefill_workspace_starts, starts, sizeof starts) == 0);
    const int32_t gathered[] = {10, 0, 15, 20, 0, 5};
    EXPECT(memcmp(m->prefill_seq_lens, gathered, sizeof gathered) == 0);
    const int32_t reqs[] = {1, 2, 2, 2, 4, 4, 5, 5, 5, 5, 7, 7, 7, 7, 7};
    EXPECT(memcmp(m->req_id_per_token, reqs, sizeof reqs) == 0);
    args = make_build(3, STARTS(0, 0, 0), (int32_t[]){40, 0, 9}, 0);
    EXPECT_OK(smla_builder_build(builder, &args, &m, &error));
    EXPECT_EQ(m->split.num_decodes, 3);
    EXPECT_EQ(m->decode_query_len, 0);
    EXPECT_EQ(m->num_chunks, 0);
    smla_builder_destroy(builder);
}

/* Speculative decodes padded for a graph: requests without a query, tokens without a request. */
static void
test_padded_decodes(void)
{
    smla_builder_config config = make_config(128, SMLA_KV_FP8_DS_MLA, SMLA_PATH_AUTO);
    config.decode_threshold = 3;
    smla_builder *builder = create(&config);
    const smla_build_args args = make_build(4, STARTS(2, 2, 2, 0), (int32_t[]){9, 2, 40, 0}, 8);
    const smla_metadata *m = NULL;
    EXPECT_OK(smla_builder_build(builder, &args, &m, &error));
    EXPECT_EQ(m->split.num_decodes, 4);
    EXPECT_EQ(m->split.num_decode_tokens, 8);
    EXPECT_EQ(m->decode_query_len, 2);
    EXPECT(m->decode_num_splits >= 1 && m->decode_num_splits <= 64);
    EXPECT(m->num_chunks == 0 && m->chunks == NULL && m->prefill_request_ids == NULL);
    const int32_t reqs[] = {0, 0, 1, 1, 2, 2, 0, 0};
    EXPECT(memcmp(m->req_id_per_token, reqs, sizeof reqs) == 0);
    EXPECT_OK(smla_builder_build(builder, &args, NULL, &error)); /* metadata is optional */
    smla_builder_destroy(builder);
}

/* A build that fails leaves the metadata of the last one as it was. */
static void
test_build_errors(void)
{
    smla_builder_config config = make_config(32, SMLA_KV_FP8_DS_MLA, SMLA_PATH_AUTO);
    config.prefill_workspace_tokens = 30;
    smla_builder *builder = create(&config);
    smla_build_args good = make_build(2, STARTS(1, 3), (int32_t[]){9, 20}, 4);
    const smla_metadata *m = NULL;
    EXPECT_OK(smla_builder_build(builder, &good, &m, &error));
    const smla_metadata before = *m;
#define EXPECT_REFUSED(part)                                                            \
    EXPECT_FAIL(smla_builder_build(builder, &bad, &m, &error), SMLA_ERROR_VALUE, part); \
    bad = good
    smla_build_args bad = good;
    bad.num_reqs = 9;
    EXPECT_REFUSED("MetadataBuilder.build: `num_reqs` must be 0 to max_num_seqs = 8, got 9");
    bad.num_reqs = -1;
    EXPECT_REFUSED("got -1");
    bad.num_actual_tokens = 65;
    EXPECT_REFUSED("`num_actual_tokens` must be 0 to max_num_batched_tokens = 64, got 65");
    bad.num_actual_tokens = 3;
    EXPECT_REFUSED("`num_actual_tokens` must be at least query_start_loc[-1] = 4, got 3");
    bad.query_start_loc_cpu = NULL;
    EXPECT_REFUSED("`query_start_loc` must");
    bad.seq_lens_cpu = NULL;
    EXPECT_REFUSED("`seq_lens` must");
    bad.block_table = NULL;
    EXPECT_REFUSED("`block_table` must be given, got none");
    bad.block_table = &ARRAY(int32, 1, 5)->tensor;
    EXPECT_REFUSED("`block_table` must have shape [>= 2, any], got [1, 5]");
    bad.block_table = &ARRAY(int32, 2, 2)->tensor;
    EXPECT_REFUSED(
        "`block_table` must have at least 3 columns for the 20 tokens of request 1, got 2");
    bad.seq_lens_cpu = (int32_t[]){9, 2};
    EXPECT_REFUSED(
        "`seq_lens` must be query length to max_model_len (3 to 40) at request 1, got 2");
    bad.seq_lens_cpu = (int32_t[]){9, 41};
    EXPECT_REFUSED("(3 to 40) at request 1, got 41");
    bad.seq_lens_cpu = (int32_t[]){9, 31};
    EXPECT_REFUSED("MetadataBuilder.build: `seq_lens` must fit the workspace of 30 tokens one by "
                   "one, got 31 at request 1");
    bad.query_start_loc_cpu = STARTS(3, 1);
    EXPECT_REFUSED(
        "must have decodes (at most 1 tokens) before prefills, got 1 tokens at request 1");
    bad.num_reqs = 0;
    bad.query_start_loc_cpu = (int32_t[]){0};
    EXPECT_REFUSED("`num_actual_tokens` must be 0 without requests, got 4");
#undef EXPECT_REFUSED
    EXPECT_EQ(m->num_reqs, before.num_reqs);
    EXPECT_EQ(m->num_actual_tokens, before.num_actual_tokens);
    EXPECT_EQ(m->split.num_decodes, before.split.num_decodes);
    EXPECT_EQ(m->num_chunks, before.num_chunks);
    EXPECT_EQ(m->chunks[0].tot_seqlen, 20);
    EXPECT_EQ(m->prefill_request_ids[3], 0);
    smla_builder_destroy(builder);
}

static void
test_config_errors(void)
{
    smla_builder *builder = NULL;
    const smla_builder_config good = make_config(32, SMLA_KV_FP8_DS_MLA, SMLA_PATH_AUTO);
    smla_builder_config bad = good;
#define EXPECT_REFUSED(status, part)                                        \
    EXPECT_FAIL(smla_builder_create(&bad, &builder, &error), status, part); \
    EXPECT(builder == NULL);                                                \
    bad = good
    bad.num_heads = 129;
    EXPECT_REFUSED(SMLA_ERROR_VALUE, "MetadataBuilder: `num_heads` must be 1 to 128, got 129");
    bad.block_size = 0;
    EXPECT_REFUSED(SMLA_ERROR_VALUE, "`block_size` must be 1 to");
    bad.topk_tokens = -1;
    EXPECT_REFUSED(SMLA_ERROR_VALUE, "`topk_tokens` must be 1 to");
    bad.max_num_seqs = 0;
    EXPECT_REFUSED(SMLA_ERROR_VALUE, "`max_num_seqs`");
    bad.max_num_batched_tokens = INT64_MAX;
    EXPECT_REFUSED(SMLA_ERROR_VALUE, "`max_num_batched_tokens`");
    bad.max_model_len = INT64_MAX;
    EXPECT_REFUSED(SMLA_ERROR_VALUE, "`max_model_len`");
    bad.decode_threshold = -1;
    EXPECT_REFUSED(SMLA_ERROR_VALUE, "`decode_threshold`");
    bad.prefill_workspace_tokens = -1;
    EXPECT_REFUSED(SMLA_ERROR_VALUE, "`prefill_workspace_tokens`");
    bad.kv_format = SMLA_KV_INFER;
    EXPECT_REFUSED(SMLA_ERROR_VALUE, "`kv_format` must be a known cache format, got 0");
    bad.path = SMLA_PATH_BF16;
    EXPECT_REFUSED(SMLA_ERROR_VALUE, "`path` must serve a fp8_ds_mla cache");
    bad.cp_size = 2;
    EXPECT_REFUSED(SMLA_ERROR_VALUE,
                   "`cp` must be (rank, ranks, interleave) with 0 <= rank < ranks "
                   "and interleave >= 1, got (0, 2, 0)");
    bad.path = 17;
    EXPECT_REFUSED(SMLA_ERROR_VALUE, "`path` must be a smla_path, got 17");
    bad.device = (DLDevice){.device_type = kDLMetal, .device_id = 3};
    EXPECT_REFUSED(SMLA_ERROR_RUNTIME, "MetadataBuilder: arrays must be on a device of this build");
    bad.workspace = &ARRAY(bf16, 10, 575)->tensor;
    EXPECT_REFUSED(SMLA_ERROR_VALUE, "`workspace` must have shape [>= 1, 576], got [10, 575]");
    bad.workspace = &ARRAY(bf16, 10, 576)->tensor;
    bad.prefill_workspace_tokens = 11;
    EXPECT_REFUSED(SMLA_ERROR_VALUE, "`workspace` must have shape [>= 11, 576], got [10, 576]");
    /* Buffers that are too large for memory, and whose sizes are too large for int64. */
    bad.max_num_batched_tokens = INT32_MAX;
    bad.topk_tokens = INT32_MAX;
    EXPECT_REFUSED(SMLA_ERROR_MEMORY, "MetadataBuilder: ");
#undef EXPECT_REFUSED
}

/* ---- DeepSeek V4 --------------------------------------------------------------------------- */

static smla_v4_config
make_v4_config(void)
{
    return (smla_v4_config){.struct_size = sizeof(smla_v4_config),
                            .num_heads = 2,
                            .window = 3,
                            .topk_tokens = 4,
                            .block_size = 32,
                            .swa_block_size = 4,
                            .max_num_seqs = 4,
                            .max_num_batched_tokens = 8,
                            .max_model_len = 40,
                            .num_ratios = 2,
                            .compress_ratios = {4, 16},
                            .state_block_sizes = {4, 8},
                            .softmax_scale = 1,
                            .kv_format = SMLA_KV_FP8_V4,
                            .compressed_kv_format = SMLA_KV_FP8_V4,
                            .path = SMLA_PATH_SEPARATE,
                            .device = cpu};
}

/* A decode and two prefills, of which one at a time has the workspace. */
static void
test_v4_metadata(void)
{
    smla_v4_config config = make_v4_config();
    config.prefill_chunk_size = 1;
    smla_v4_builder *builder = NULL;
    const smla_v4_metadata *m = NULL;
    EXPECT_OK(smla_v4_builder_create(&config, &builder, &error));
    EXPECT_EQ(smla_v4_builder_workspace_bytes(builder), (10 + 3 + 8) * 1024);
    const array *table = ARRAY(int32, 3, 5);
    const array *slots = ARRAY(int64, 6);
    memset(table->tensor.data, 0, 3 * 5 * sizeof(int32_t));
    memset(slots->tensor.data, 0, 6 * sizeof(int64_t));
    const int32_t seq_lens[] = {33, 9, 3};
    smla_v4_build_args args = {.struct_size = sizeof args,
                               .num_reqs = 3,
                               .num_actual_tokens = 6,
                               .max_seq_len = 33,
                               .query_start_loc_cpu = STARTS(1, 2, 3),
                               .seq_lens_cpu = seq_lens,
                               .slot_mapping = &slots->tensor,
                               .block_table = &table->tensor,
                               .compressed_tables = {&table->tensor}};
    EXPECT_OK(smla_v4_builder_build(builder, &args, &m, &error));
    EXPECT_EQ((int)m->path, SMLA_PATH_SEPARATE);
    EXPECT_EQ(m->split.num_prefills, 2);
    EXPECT_EQ(m->decode_query_len, 1);
    const int32_t positions[] = {32, 7, 8, 0, 1, 2};
    EXPECT(memcmp(m->positions, positions, sizeof positions) == 0);
    const int32_t gather_lens[] = {3, 4, 3};
    EXPECT(memcmp(m->gather_lens, gather_lens, sizeof gather_lens) == 0);
    const int32_t swa_lens[] = {3, 3, 3, 1, 2, 3};
    EXPECT(memcmp(m->swa_lens, swa_lens, sizeof swa_lens) == 0);
    const smla_prefill_chunk wanted[] = {{0, 1, 1, 3, 9}, {1, 2, 3, 6, 3}};
    EXPECT_EQ(m->num_chunks, 2);
    EXPECT(memcmp(m->chunks, wanted, sizeof wanted) == 0);
    EXPECT_EQ(m->num_groups, 3); /* two ratios and the indexer of ratio 4 */
    EXPECT(m->groups[0].ratio == 4 && m->groups[1].ratio == 0 && m->groups[2].ratio == 4);
    EXPECT(m->groups[0].indices == NULL && m->groups[0].state_slot_mapping == NULL);
    const int32_t complete[] = {8, 2, 2, 0, 0, 0};
    EXPECT(memcmp(m->groups[0].context_lens, complete, sizeof complete) == 0);
    /* A build that is refused leaves the step. */
    args.max_seq_len = 32;
    EXPECT_FAIL(smla_v4_builder_build(builder, &args, NULL, &error), SMLA_ERROR_VALUE,
                "`max_seq_len` must be at least the longest request (33), got 32");
    EXPECT_EQ(m->num_actual_tokens, 6);
    smla_v4_builder_destroy(builder);
}

/* A caller of an older version has a shorter config. */
static void
test_v4_config(void)
{
    smla_v4_builder *builder = NULL;
    smla_v4_config config = make_v4_config();
    config.struct_size = offsetof(smla_v4_config, workspace);
    EXPECT_OK(smla_v4_builder_create(&config, &builder, &error));
    EXPECT_EQ(smla_v4_builder_workspace_bytes(builder), 4 * (10 + 3 + 8) * 1024);
    smla_v4_builder_destroy(builder);
    builder = NULL;
#define EXPECT_REFUSED(part)                                                                \
    EXPECT_FAIL(smla_v4_builder_create(&config, &builder, &error), SMLA_ERROR_VALUE, part); \
    EXPECT(builder == NULL);                                                                \
    config = make_v4_config()
    config = make_v4_config();
    config.cp_size = 2;
    config.cp_interleave = 1;
    EXPECT_REFUSED("`path` must be \"direct\" or left out with `cp` of several ranks, whose "
                   "prefills read the caches, got \"separate\"");
    config.window = 0;
    EXPECT_REFUSED("MetadataBuilder: `window` must be 1 to 1073741823, got 0");
    config.num_ratios = 5;
    EXPECT_REFUSED("`num_ratios` must be 0 to 4, got 5");
    config.compress_ratios[1] = 4;
    EXPECT_REFUSED("`compress_ratios` must be different, got 4 twice");
    config.state_block_sizes[1] = 0;
    EXPECT_REFUSED("`state_block_sizes` must be 1 to 2147483647, got 0");
    config.q_scale = -1;
    EXPECT_REFUSED("`q_scale` must be");
    config.path = SMLA_PATH_MIXED;
    EXPECT_REFUSED("`path` must be \"direct\" or \"separate\", got 1");
    config.kv_format = SMLA_KV_FP4_V41;
    EXPECT_REFUSED("`kv_format` must be a format of keys of 512 values that attention takes");
#undef EXPECT_REFUSED
}

int
main(void)
{
    RUN(test_v4_metadata);
    RUN(test_v4_config);
    RUN(test_split);
    RUN(test_split_errors);
    RUN(test_order);
    RUN(test_chunks);
    RUN(test_path);
    RUN(test_separate_metadata);
    RUN(test_idle_requests);
    RUN(test_padded_decodes);
    RUN(test_build_errors);
    RUN(test_config_errors);
    return report("test_plan");
}
