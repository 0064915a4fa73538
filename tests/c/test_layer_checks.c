/* test_layer_checks.c: layers of dense MLA, DeepSeek-V3.2 and V4 check each array of their caller
 * once, however many operators and chunks they are composed of, and nothing of the step's own
 * memory but its workspaces.
 *
 * The files with the rules of arrays are compiled into this program, under other names. The linker
 * then takes what this program defines in their place, which counts the calls.
 */
#include "core/rule.h"

smla_status real_require(smla_checker *c, const smla_rule *rule);
smla_status real_require_kv(smla_checker *c, const smla_cache_rule *rule, smla_kv_view *view);

#define smla_require_kv real_require_kv
#define fail_dtype      fail_cache_dtype
#include "core/kv_rule.c" // NOLINT(bugprone-suspicious-include)
#undef smla_require_kv
#undef fail_dtype

#define smla_require real_require
#include "core/rule.c" // NOLINT(bugprone-suspicious-include)
#undef smla_require

#include "reference.h"

enum { MOST = 32 };

static struct {
    int num_arrays;
    struct {
        const void *data;
        const char *name;
        int times;
    } arrays[MOST];
} seen;

static void
count(const char *name, const DLTensor *tensor)
{
    const void *const data = smla_data(tensor);
    int i = 0;
    if (tensor == NULL) {
        return;
    }
    while (i < seen.num_arrays && seen.arrays[i].data != data) {
        i++;
    }
    if (i < MOST) {
        seen.num_arrays += i == seen.num_arrays;
        seen.arrays[i].data = data;
        seen.arrays[i].name = name;
        seen.arrays[i].times++;
    }
}

smla_status
smla_require(smla_checker *c, const smla_rule *rule)
{
    count(rule->name, rule->tensor);
    return real_require(c, rule);
}

smla_status
smla_require_kv(smla_checker *c, const smla_cache_rule *rule, smla_kv_view *view)
{
    count(rule->name, rule->tensor);
    return real_require_kv(c, rule, view);
}

/* Expects that the arrays were checked once each, and no others but `num_own` of the step. */
static void
expect_once(const array *const *given, int num_given, int num_own)
{
    EXPECT_EQ(seen.num_arrays, num_given + num_own);
    for (int i = 0; i < seen.num_arrays; i++) {
        EXPECT_EQ(seen.arrays[i].times, 1);
        if (seen.arrays[i].times != 1) {
            fprintf(stderr, "%s was checked %d times\n", seen.arrays[i].name, seen.arrays[i].times);
        }
    }
    for (int i = 0; i < num_given; i++) {
        bool found = false;
        for (int k = 0; k < seen.num_arrays; k++) {
            found = found || seen.arrays[k].data == given[i]->tensor.data;
        }
        EXPECT(found);
    }
}

#define EXPECT_ONCE(num_own, ...)                                       \
    do {                                                                \
        const array *const own[] = {__VA_ARGS__};                       \
        expect_once(own, (int)(sizeof own / sizeof own[0]), (num_own)); \
    } while (0)

/* ---- A batch ------------------------------------------------------------------------------- */

enum { HEADS = 2, BLOCK = 4, REQS = 3, LEN = 40, PAGES = REQS * LEN / BLOCK, TOKENS = 9 };

/* A decode, and two prefills with context. */
static const int32_t starts[REQS + 1] = {0, 1, 5, TOKENS};
static const int32_t lens[REQS] = {LEN, LEN, LEN};

static array *
make_table(void)
{
    array *const table = ARRAY(int32, REQS, LEN / BLOCK);
    for (int i = 0; i < PAGES; i++) {
        SET(table, i, i / (LEN / BLOCK), i % (LEN / BLOCK));
    }
    return table;
}

static array *
make_slots(void)
{
    array *const slots = ARRAY(int64, TOKENS);
    for (int req = 0; req < REQS; req++) {
        for (int32_t t = starts[req]; t < starts[req + 1]; t++) {
            SET(slots, (req + 1) * LEN - (starts[req + 1] - t), t);
        }
    }
    return slots;
}

/* ---- Dense MLA ----------------------------------------------------------------------------- */

enum { PN = 8, PV = 16, COLUMNS = HEADS * (PN + PV) };

static smla_dense_builder *
build_dense(int32_t path, int64_t rows, const array *table, const array *slots,
            const array *device_lens, const smla_dense_metadata **metadata)
{
    const smla_dense_config config = {.struct_size = sizeof config,
                                      .num_heads = HEADS,
                                      .block_size = BLOCK,
                                      .qk_nope_head_dim = PN,
                                      .v_head_dim = PV,
                                      .max_num_seqs = REQS,
                                      .max_num_batched_tokens = TOKENS,
                                      .max_model_len = LEN,
                                      .kv_format = SMLA_KV_BFLOAT16,
                                      .path = path,
                                      .device = cpu,
                                      .prefill_workspace_tokens = rows};
    smla_dense_builder *builder = NULL;
    EXPECT_OK(smla_dense_builder_create(&config, &builder, &error));
    const smla_dense_build_args args = {.struct_size = sizeof args,
                                        .query_start_loc_cpu = starts,
                                        .seq_lens_cpu = lens,
                                        .seq_lens = &device_lens->tensor,
                                        .block_table = &table->tensor,
                                        .slot_mapping = &slots->tensor,
                                        .num_reqs = REQS,
                                        .num_actual_tokens = TOKENS};
    EXPECT_OK(smla_dense_builder_build(builder, &args, metadata, &error));
    return builder;
}

static array *
make_lens(void)
{
    array *const device_lens = ARRAY(int32, REQS);
    for (int req = 0; req < REQS; req++) {
        SET(device_lens, lens[req], req);
    }
    return device_lens;
}

static array *
make_rope_table(void)
{
    return fill_normal(ARRAY(fp32, LEN, ROPE), 1.0);
}

static void
test_dense_layer(void)
{
    static const struct {
        int32_t path;
        int64_t rows;
        int num_chunks;
    } cases[] = {{SMLA_PATH_MIXED, 0, 0}, {SMLA_PATH_SEPARATE, 80, 1}, {SMLA_PATH_SEPARATE, 8, 9}};
    for (int i = 0; i < 3; i++) {
        const array *const table = make_table(), *const slots = make_slots();
        const array *const cache = fill_normal(ARRAY(bf16, PAGES, BLOCK, ROW), 0.3);
        const array *const q = fill_normal(ARRAY(bf16, TOKENS, HEADS, PN + ROPE), 0.3);
        const array *const kv_c = fill_normal(ARRAY(bf16, TOKENS, NOPE), 0.3);
        const array *const k_pe = fill_normal(ARRAY(bf16, TOKENS, ROPE), 0.3);
        const array *const weight = fill_normal(ARRAY(bf16, NOPE, COLUMNS), 0.04);
        const array *const w_uk = fill_normal(ARRAY(bf16, NOPE, HEADS, PN), 0.04);
        const array *const w_uv = fill_normal(ARRAY(bf16, NOPE, HEADS, PV), 0.04);
        const array *const rope_table = make_rope_table();
        const array *const out = ARRAY(bf16, TOKENS, HEADS, PV), *const lse =
                                                                     ARRAY(fp32, TOKENS, HEADS);
        const smla_dense_metadata *m = NULL;
        smla_dense_builder *const builder =
            build_dense(cases[i].path, cases[i].rows, table, slots, make_lens(), &m);
        EXPECT_EQ(m->num_context_chunks, cases[i].num_chunks);
        const smla_dense_forward_args args = {.struct_size = sizeof args,
                                              .builder = builder,
                                              .q = &q->tensor,
                                              .kv_c = &kv_c->tensor,
                                              .k_pe = &k_pe->tensor,
                                              .kv_cache = &cache->tensor,
                                              .W_UK = &w_uk->tensor,
                                              .W_UV = &w_uv->tensor,
                                              .rope_table = &rope_table->tensor,
                                              .out = &out->tensor,
                                              .softmax_scale = 0.1,
                                              .kv_b_proj = &weight->tensor,
                                              .lse = &lse->tensor};
        memset(&seen, 0, sizeof seen);
        EXPECT_OK(smla_dense_forward(&args, &error));
        if (cases[i].path == SMLA_PATH_MIXED) {
            EXPECT_ONCE(0, q, kv_c, k_pe, cache, w_uk, w_uv, rope_table, out, lse, table, slots);
        } else {
            EXPECT_ONCE(2, q, kv_c, k_pe, cache, w_uk, w_uv, rope_table, out, lse, table, slots,
                        weight);
        }
        smla_dense_builder_destroy(builder);
        free_arrays("test_dense_layer");
    }
}

/* ---- DeepSeek-V3.2 ------------------------------------------------------------------------- */

enum { TOPK = 8 };

static void
test_v32_layer(void)
{
    static const int32_t paths[] = {SMLA_PATH_MIXED, SMLA_PATH_SEPARATE, SMLA_PATH_DIRECT};
    for (int i = 0; i < 3; i++) {
        const array *const table = make_table();
        const array *const cache = fill_cache(ARRAY(uint8, PAGES, BLOCK, FP8_ROW));
        const array *const q = fill_normal(ARRAY(bf16, TOKENS, HEADS, ROW), 0.3);
        array *const topk = ARRAY(int32, TOKENS, TOPK);
        const array *const sink = fill_normal(ARRAY(fp32, HEADS), 1.0);
        const array *const out = ARRAY(bf16, TOKENS, HEADS, NOPE);
        const array *const lse = ARRAY(fp32, TOKENS, HEADS);
        for (int at = 0; at < TOKENS * TOPK; at++) {
            SET(topk, at % TOPK, at / TOPK, at % TOPK);
        }
        const smla_builder_config config = {.struct_size = sizeof config,
                                            .num_heads = HEADS,
                                            .block_size = BLOCK,
                                            .topk_tokens = TOPK,
                                            .max_num_seqs = REQS,
                                            .max_num_batched_tokens = TOKENS,
                                            .max_model_len = LEN,
                                            .prefill_workspace_tokens = LEN,
                                            .kv_format = SMLA_KV_FP8_DS_MLA,
                                            .path = paths[i],
                                            .device = cpu};
        smla_builder *builder = NULL;
        const smla_metadata *m = NULL;
        EXPECT_OK(smla_builder_create(&config, &builder, &error));
        const smla_build_args build = {.struct_size = sizeof build,
                                       .query_start_loc_cpu = starts,
                                       .seq_lens_cpu = lens,
                                       .block_table = &table->tensor,
                                       .num_reqs = REQS,
                                       .num_actual_tokens = TOKENS};
        EXPECT_OK(smla_builder_build(builder, &build, &m, &error));
        const bool has_chunks = paths[i] == SMLA_PATH_SEPARATE;
        EXPECT_EQ(m->num_chunks, has_chunks ? 2 : 0);
        const smla_forward_args args = {.struct_size = sizeof args,
                                        .builder = builder,
                                        .q = &q->tensor,
                                        .kv_cache = &cache->tensor,
                                        .topk_indices = &topk->tensor,
                                        .attn_sink = &sink->tensor,
                                        .out = &out->tensor,
                                        .lse = &lse->tensor,
                                        .softmax_scale = 0.1};
        memset(&seen, 0, sizeof seen);
        EXPECT_OK(smla_forward(&args, &error));
        EXPECT_ONCE(has_chunks ? 1 : 0, q, cache, topk, sink, out, lse, table);
        smla_builder_destroy(builder);
        free_arrays("test_v32_layer");
    }
}

/* ---- DeepSeek V4 --------------------------------------------------------------------------- */

enum { RATIO = 2, V4_PAGE = 4 };

static void
test_v4_layer(void)
{
    static const int32_t paths[] = {SMLA_PATH_DIRECT, SMLA_PATH_SEPARATE};
    for (int i = 0; i < 2; i++) {
        const array *const table = make_table(), *const pages = make_table();
        const array *const slots = make_slots();
        const array *const swa = fill_normal(ARRAY(bf16, PAGES, BLOCK, NOPE), 0.3);
        const array *const rows = fill_normal(ARRAY(bf16, PAGES, V4_PAGE / RATIO, NOPE), 0.3);
        const array *const q = fill_normal(ARRAY(bf16, TOKENS, HEADS, NOPE), 0.3);
        const array *const sink = fill_normal(ARRAY(fp32, HEADS), 1.0);
        const array *const out = ARRAY(bf16, TOKENS, HEADS, NOPE);
        const array *const lse = ARRAY(fp32, TOKENS, HEADS);
        const smla_v4_config config = {.struct_size = sizeof config,
                                       .num_heads = HEADS,
                                       .window = 6,
                                       .topk_tokens = TOPK,
                                       .block_size = V4_PAGE,
                                       .swa_block_size = BLOCK,
                                       .max_num_seqs = REQS,
                                       .max_num_batched_tokens = TOKENS,
                                       .max_model_len = LEN,
                                       .prefill_chunk_size = 1,
                                       .num_ratios = 1,
                                       .compress_ratios = {RATIO},
                                       .state_block_sizes = {4},
                                       .softmax_scale = 0.1,
                                       .kv_format = SMLA_KV_BFLOAT16,
                                       .compressed_kv_format = SMLA_KV_BFLOAT16,
                                       .path = paths[i],
                                       .device = cpu};
        smla_v4_builder *builder = NULL;
        const smla_v4_metadata *m = NULL;
        EXPECT_OK(smla_v4_builder_create(&config, &builder, &error));
        const smla_v4_build_args build = {.struct_size = sizeof build,
                                          .num_reqs = REQS,
                                          .num_actual_tokens = TOKENS,
                                          .max_seq_len = LEN,
                                          .query_start_loc_cpu = starts,
                                          .seq_lens_cpu = lens,
                                          .slot_mapping = &slots->tensor,
                                          .block_table = &table->tensor,
                                          .compressed_tables = {&pages->tensor}};
        EXPECT_OK(smla_v4_builder_build(builder, &build, &m, &error));
        const bool has_chunks = paths[i] == SMLA_PATH_SEPARATE;
        EXPECT_EQ(m->num_chunks, 2);
        const smla_v4_attend_args args = {.struct_size = sizeof args,
                                          .builder = builder,
                                          .compress_ratio = RATIO,
                                          .q = &q->tensor,
                                          .swa_kv_cache = &swa->tensor,
                                          .compressed_kv_cache = &rows->tensor,
                                          .attn_sink = &sink->tensor,
                                          .out = &out->tensor,
                                          .lse = &lse->tensor};
        memset(&seen, 0, sizeof seen);
        EXPECT_OK(smla_v4_attend(&args, &error));
        EXPECT_ONCE(has_chunks ? 1 : 0, q, swa, rows, sink, out, lse, table);
        smla_v4_builder_destroy(builder);
        free_arrays("test_v4_layer");
    }
}

int
main(void)
{
    RUN(test_dense_layer);
    RUN(test_v32_layer);
    RUN(test_v4_layer);
    return report("test_layer_checks");
}
