/* test_dense_step.c: one layer of dense MLA over 2 decodes and 4 prefills, of which two have no
 * context: both paths and both plans of chunks against fp64 over keys and values of all heads.
 *
 * Bounds: queries, keys, values and results are rounded to bf16 on the way, by 2^-8 each, and once
 * more for each merge. With absorbed weights, q_proj and o_proj are identities, so that queries and
 * results are those of the heads.
 */
#include <math.h>

#include "reference.h"

enum {
    HEADS = 2,
    PN = 8,
    PV = 16,
    COLUMNS = HEADS * (PN + PV),
    BLOCK = 4,
    REQS = 6,
    DECODES = 2,
    MAX_LEN = 40,
    BLOCKS = MAX_LEN / BLOCK,
    PAGES = REQS * BLOCKS,
    PADDING = 2,
    TOKENS = 22, /* 1 + 2 + 3 + 5 + 4 + 5, and the padding */
};

static const int32_t seq_lens[REQS] = {9, 2, 30, 5, 4, 40};
static const int32_t starts[REQS + 1] = {0, 1, 3, 6, 11, 15, 20};
static const double scale = 0.1;

typedef struct batch {
    array *block_table, *lens, *slots, *cache;
    array *q, *kv_c, *k_pe, *weight, *w_uk, *w_uv, *out, *lse;
} batch;

static batch
make_batch(void)
{
    batch b = {.block_table = ARRAY(int32, REQS, BLOCKS),
               .lens = ARRAY(int32, REQS),
               .slots = ARRAY(int64, TOKENS),
               .cache = fill_normal(ARRAY(bf16, PAGES, BLOCK, ROW), 0.3),
               .q = fill_normal(ARRAY(bf16, TOKENS, HEADS, PN + ROPE), 0.3),
               .kv_c = fill_normal(ARRAY(bf16, TOKENS, NOPE), 0.3),
               .k_pe = fill_normal(ARRAY(bf16, TOKENS, ROPE), 0.3),
               .weight = fill_normal(ARRAY(bf16, NOPE, COLUMNS), 0.04),
               .w_uk = ARRAY(bf16, NOPE, HEADS, PN),
               .w_uv = ARRAY(bf16, NOPE, HEADS, PV),
               .out = ARRAY(bf16, TOKENS + 1, HEADS, PV),
               .lse = ARRAY(fp32, TOKENS + 1, HEADS)};
    for (int req = 0; req < REQS; req++) {
        SET(b.lens, seq_lens[req], req);
        for (int block = 0; block < BLOCKS; block++) {
            SET(b.block_table, (req * BLOCKS + block) * 7 % PAGES, req, block);
        }
    }
    for (int t = 0; t < TOKENS; t++) {
        SET(b.slots, -1, t);
    }
    for (int req = 0; req < REQS; req++) {
        for (int32_t t = starts[req]; t < starts[req + 1]; t++) {
            const int32_t at = seq_lens[req] - (starts[req + 1] - t);
            SET(b.slots, GET(b.block_table, req, at / BLOCK) * BLOCK + at % BLOCK, t);
        }
    }
    for (int l = 0; l < NOPE; l++) {
        for (int column = 0; column < COLUMNS; column++) {
            const int head = column / (PN + PV), i = column % (PN + PV);
            if (i < PN) {
                SET(b.w_uk, GET(b.weight, l, column), l, head, i);
            } else {
                SET(b.w_uv, GET(b.weight, l, column), l, head, i - PN);
            }
        }
    }
    return b;
}

static smla_dense_config
make_config(int32_t path, int32_t plan, int64_t rows)
{
    return (smla_dense_config){.struct_size = sizeof(smla_dense_config),
                               .num_heads = HEADS,
                               .block_size = BLOCK,
                               .qk_nope_head_dim = PN,
                               .v_head_dim = PV,
                               .max_num_seqs = REQS,
                               .max_num_batched_tokens = TOKENS,
                               .max_model_len = MAX_LEN,
                               .decode_threshold = 2,
                               .kv_format = SMLA_KV_BFLOAT16,
                               .path = path,
                               .device = cpu,
                               .prefill_workspace_tokens = rows,
                               .context_plan = plan};
}

static smla_dense_builder *
build(const batch *b, const smla_dense_config *config, const smla_dense_metadata **metadata)
{
    smla_dense_builder *builder = NULL;
    EXPECT_OK(smla_dense_builder_create(config, &builder, &error));
    const smla_dense_build_args args = {.struct_size = sizeof args,
                                        .query_start_loc_cpu = starts,
                                        .seq_lens_cpu = seq_lens,
                                        .seq_lens = &b->lens->tensor,
                                        .block_table = &b->block_table->tensor,
                                        .slot_mapping = &b->slots->tensor,
                                        .num_reqs = REQS,
                                        .num_actual_tokens = TOKENS};
    EXPECT_OK(smla_dense_builder_build(builder, &args, metadata, &error));
    return builder;
}

static smla_dense_forward_args
forward_args(const batch *b, smla_dense_builder *builder)
{
    return (smla_dense_forward_args){.struct_size = sizeof(smla_dense_forward_args),
                                     .builder = builder,
                                     .q = &b->q->tensor,
                                     .kv_c = &b->kv_c->tensor,
                                     .k_pe = &b->k_pe->tensor,
                                     .kv_cache = &b->cache->tensor,
                                     .W_UK = &b->w_uk->tensor,
                                     .W_UV = &b->w_uv->tensor,
                                     .out = &b->out->tensor,
                                     .softmax_scale = scale,
                                     .kv_b_proj = &b->weight->tensor,
                                     .lse = &b->lse->tensor};
}

/* A key's logit, and its value: those of head `head` that the weight makes of a cache row. `size`
 * is the sum of the sizes of the logit's products. */
static double
score(const batch *b, int64_t token, int head, int64_t slot, double value[PV], double *size)
{
    double kv[PN + PV] = {0.0};
    double logit = 0.0;
    *size = 0.0;
    for (int l = 0; l < NOPE; l++) {
        const double latent = GET(b->cache, slot / BLOCK, slot % BLOCK, l);
        for (int i = 0; i < PN + PV; i++) {
            kv[i] += latent * GET(b->weight, l, head * (PN + PV) + i);
        }
    }
    for (int i = 0; i < PN + ROPE; i++) {
        const double key =
            i < PN ? kv[i] : GET(b->cache, slot / BLOCK, slot % BLOCK, NOPE + i - PN);
        logit += scale * GET(b->q, token, head, i) * key;
        *size += scale * fabs(GET(b->q, token, head, i) * key);
    }
    memcpy(value, kv + PN, PV * sizeof *value);
    return logit;
}

/* Compares one token with fp64 over the cache, which the layer has written. Absorbed queries and
 * results are rounded in the latent space, whose sums have more and larger terms; 1e-3 is for
 * these. */
static void
expect_token(const batch *b, int req, int64_t token, double num_roundings)
{
    const int64_t num_keys = seq_lens[req] - (starts[req + 1] - 1 - token);
    for (int head = 0; head < HEADS; head++) {
        double logits[MAX_LEN], values[MAX_LEN][PV], size = 0.0, top = -INFINITY, total = 0.0;
        for (int64_t j = 0; j < num_keys; j++) {
            const int64_t slot = (int64_t)GET(b->block_table, req, j / BLOCK) * BLOCK + j % BLOCK;
            double own = 0.0;
            logits[j] = score(b, token, head, slot, values[j], &own);
            size = fmax(size, own);
            top = fmax(top, logits[j]);
        }
        for (int64_t j = 0; j < num_keys; j++) {
            total += exp(logits[j] - top);
        }
        EXPECT_NEAR(GET(b->lse, token, head), top + log(total), 0x1p-7 * size + 1e-5);
        for (int i = 0; i < PV; i++) {
            double out = 0.0, magnitude = 0.0;
            for (int64_t j = 0; j < num_keys; j++) {
                out += exp(logits[j] - top) / total * values[j][i];
                magnitude += exp(logits[j] - top) / total * fabs(values[j][i]);
            }
            EXPECT_NEAR(GET(b->out, token, head, i), out,
                        0x1p-8 * (num_roundings + 2.0 * size) * magnitude + 1e-3);
        }
    }
}

static void
expect_step(const batch *b, double num_roundings)
{
    for (int req = 0; req < REQS; req++) {
        for (int64_t token = starts[req]; token < starts[req + 1]; token++) {
            expect_token(b, req, token, num_roundings);
        }
    }
    for (int64_t token = starts[REQS]; token < TOKENS; token++) {
        EXPECT_NEAR(GET(b->out, token, HEADS - 1, PV - 1), 0.0, 0.0);
        EXPECT_NEAR(GET(b->lse, token, HEADS - 1), -INFINITY, 0.0);
    }
    EXPECT(is_poison(slice(b->out, 0, TOKENS, TOKENS + 1, 1)));
    EXPECT(is_poison(slice(b->lse, 0, TOKENS, TOKENS + 1, 1)));
}

static void
test_paths(void)
{
    static const struct {
        int32_t path, plan, num_chunks;
        int64_t rows;
    } cases[] = {
        {SMLA_PATH_MIXED, SMLA_CONTEXT_EQUAL, 0, 0},
        {SMLA_PATH_SEPARATE, SMLA_CONTEXT_EQUAL, 1, 0},
        {SMLA_PATH_SEPARATE, SMLA_CONTEXT_EQUAL, 9, 8}, /* the smallest workspace: a page of each */
        {SMLA_PATH_SEPARATE, SMLA_CONTEXT_PACKED, 16, 4},
        {SMLA_PATH_SEPARATE, SMLA_CONTEXT_PACKED, 6, 13},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        const batch b = make_batch();
        const smla_dense_config config = make_config(cases[i].path, cases[i].plan, cases[i].rows);
        const smla_dense_metadata *m = NULL;
        smla_dense_builder *builder = build(&b, &config, &m);
        EXPECT_EQ((int)m->path, cases[i].path);
        EXPECT_EQ(m->split.num_decodes, DECODES);
        EXPECT_EQ(m->num_context_chunks, cases[i].num_chunks);
        const smla_dense_forward_args args = forward_args(&b, builder);
        EXPECT_OK(smla_dense_forward(&args, &error));
        expect_step(&b, 4.0 + cases[i].num_chunks);
        smla_dense_builder_destroy(builder);
        free_arrays("test_paths");
    }
}

/* Weights whose products are exact: queries' latents are the queries, and outputs the values. */
typedef struct identities {
    array *w_q_uk;     /* [H * 512, Lq] */
    array *w_qr, *w_q; /* [Lq, H * R] and [Lq, H * Pn] */
    array *w_uv_o;     /* [hidden, H * 512] */
    array *o_proj;     /* [hidden, hidden] */
} identities;

static array *
make_identity(int64_t size)
{
    array *x = ARRAY(bf16, size, size);
    for (int64_t i = 0; i < size * size; i++) {
        SET(x, i % size == i / size ? 1.0 : 0.0, i / size, i % size);
    }
    return x;
}

static identities
absorb(const batch *b)
{
    enum { QUERIES = HEADS * (PN + ROPE), OUTPUTS = HEADS * PV };
    array *const q_proj = make_identity(QUERIES);
    const identities w = {.w_q_uk = ARRAY(bf16, HEADS * NOPE, QUERIES),
                          .w_qr = ARRAY(bf16, QUERIES, HEADS * ROPE),
                          .w_q = ARRAY(bf16, QUERIES, HEADS * PN),
                          .w_uv_o = ARRAY(bf16, OUTPUTS, HEADS * NOPE),
                          .o_proj = make_identity(OUTPUTS)};
    for (int64_t i = 0; i < QUERIES; i++) {
        for (int64_t j = 0; j < QUERIES; j++) {
            const int64_t head = j / (PN + ROPE), at = j % (PN + ROPE);
            if (at < PN) {
                SET(w.w_q, GET(q_proj, i, j), i, head * PN + at);
            } else {
                SET(w.w_qr, GET(q_proj, i, j), i, head * ROPE + at - PN);
            }
        }
    }
    const smla_absorb_q_proj_args queries = {.struct_size = sizeof queries,
                                             .q_proj = &q_proj->tensor,
                                             .w_uk = &b->w_uk->tensor,
                                             .out = &w.w_q_uk->tensor};
    EXPECT_OK(smla_absorb_q_proj(&queries, &error));
    const smla_absorb_o_proj_args outputs = {.struct_size = sizeof outputs,
                                             .o_proj = &w.o_proj->tensor,
                                             .w_uv = &b->w_uv->tensor,
                                             .out = &w.w_uv_o->tensor};
    EXPECT_OK(smla_absorb_o_proj(&outputs, &error));
    return w;
}

/* The heads' queries, or results, as rows of one dimension. */
static array *
join_heads(const array *x)
{
    array *const joined = ARRAY(bf16, x->shape[0], x->shape[1] * x->shape[2]);
    for (int64_t i = 0; i < x->shape[0] * joined->shape[1]; i++) {
        const int64_t row = i / joined->shape[1], at = i % joined->shape[1];
        SET(joined, GET(x, row, at / x->shape[2], at % x->shape[2]), row, at);
    }
    return joined;
}

static void
test_absorbed_weights(void)
{
    static const struct {
        int32_t path, num_chunks;
        int64_t rows;
    } cases[] = {{SMLA_PATH_MIXED, 0, 0}, {SMLA_PATH_SEPARATE, 1, 0}, {SMLA_PATH_SEPARATE, 9, 8}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        const batch b = make_batch();
        const identities w = absorb(&b);
        const smla_dense_config config = make_config(cases[i].path, 0, cases[i].rows);
        const smla_dense_metadata *m = NULL;
        smla_dense_builder *builder = build(&b, &config, &m);
        EXPECT_EQ(m->num_context_chunks, cases[i].num_chunks);
        array *const q_c = join_heads(b.q), *const out = ARRAY(bf16, TOKENS, HEADS * PV);
        const bool has_prefills = cases[i].path == SMLA_PATH_SEPARATE;
        const smla_dense_absorbed_forward_args args = {
            .struct_size = sizeof args,
            .builder = builder,
            .q_c = &q_c->tensor,
            .kv_c = &b.kv_c->tensor,
            .k_pe = &b.k_pe->tensor,
            .kv_cache = &b.cache->tensor,
            .W_Q_UK = &transpose(w.w_q_uk, 0, 1)->tensor,
            .W_QR = &w.w_qr->tensor,
            .W_UV_O = &transpose(w.w_uv_o, 0, 1)->tensor,
            .W_Q = has_prefills ? &w.w_q->tensor : NULL,
            .o_proj = has_prefills ? &w.o_proj->tensor : NULL,
            .kv_b_proj = has_prefills ? &b.weight->tensor : NULL,
            .out = &out->tensor,
            .softmax_scale = scale,
            .lse = &b.lse->tensor,
        };
        EXPECT_OK(smla_dense_absorbed_forward(&args, &error));
        for (int64_t at = 0; at < TOKENS * HEADS * PV; at++) {
            const int64_t token = at / (HEADS * PV), head = at / PV % HEADS;
            SET(b.out, GET(out, token, at % (HEADS * PV)), token, head, at % PV);
        }
        expect_step(&b, 5.0 + cases[i].num_chunks);
        smla_dense_builder_destroy(builder);
        free_arrays("test_absorbed_weights");
    }
}

/* out has the same bytes whether the call gives lse or not. */
static void
test_without_lse(void)
{
    for (int32_t path = SMLA_PATH_MIXED; path <= SMLA_PATH_SEPARATE; path++) {
        const batch b = make_batch();
        const smla_dense_config config = make_config(path, SMLA_CONTEXT_EQUAL, 8);
        smla_dense_builder *builder = build(&b, &config, NULL);
        array *const other = ARRAY(bf16, TOKENS, HEADS, PV);
        smla_dense_forward_args args = forward_args(&b, builder);
        EXPECT_OK(smla_dense_forward(&args, &error));
        args.lse = NULL;
        args.out = &other->tensor;
        EXPECT_OK(smla_dense_forward(&args, &error));
        EXPECT(memcmp(other->tensor.data, b.out->tensor.data,
                      sizeof(uint16_t) * TOKENS * HEADS * PV) == 0);
        args.lse = &slice(b.lse, 1, 0, 1, 1)->tensor;
        EXPECT_FAIL(smla_dense_forward(&args, &error), SMLA_ERROR_VALUE, "`lse` must have shape");
        smla_dense_builder_destroy(builder);
        free_arrays("test_without_lse");
    }
}

/* What a user of the metadata reads: the plan "packed" with 13 rows. */
static void
test_metadata(void)
{
    const batch b = make_batch();
    const smla_dense_config config = make_config(SMLA_PATH_SEPARATE, SMLA_CONTEXT_PACKED, 13);
    const smla_dense_metadata *m = NULL;
    smla_dense_builder *builder = build(&b, &config, &m);
    /* Contexts are 27, 0, 0 and 35: 12 + 12 + 3 rows, then 12 + 12 + 11. */
    static const int32_t lens[] = {12, 12, 3, 12, 12, 11}, firsts[] = {0, 12, 24, 0, 12, 24};
    EXPECT_EQ(m->num_context_chunks, 6);
    for (int i = 0; i < 6; i++) {
        const smla_context_chunk *const chunk = &m->context_chunks[i];
        EXPECT_EQ(chunk->req_start, i < 3 ? 0 : 3);
        EXPECT_EQ(chunk->req_end, i < 3 ? 1 : 4);
        EXPECT_EQ(chunk->num_tokens, lens[i]);
        EXPECT_EQ(m->context_chunk_lens[chunk->first], lens[i]);
        EXPECT_EQ(m->context_chunk_starts[chunk->first], firsts[i]);
        EXPECT_EQ(m->context_chunk_key_starts[chunk->first + i + 1], lens[i]);
        EXPECT_EQ(m->context_chunk_query_starts[chunk->first + i + 1], i < 3 ? 3 : 5);
    }
    const smla_dense_config mixed = make_config(SMLA_PATH_MIXED, 0, 0);
    smla_dense_builder *other = build(&b, &mixed, &m);
    EXPECT(m->context_chunks == NULL);
    const int64_t bytes = smla_dense_builder_workspace_bytes(builder);
    EXPECT(bytes - smla_dense_builder_workspace_bytes(other) >= 2 * (13 * ROW + TOKENS * COLUMNS));
    EXPECT_EQ(smla_dense_builder_workspace_bytes(NULL), 0);
    smla_dense_builder_destroy(other);
    smla_dense_builder_destroy(builder);
}

static void
test_errors(void)
{
    const batch b = make_batch();
    smla_dense_builder *builder = NULL;
    smla_dense_config config = make_config(SMLA_PATH_BF16, 0, 0);
    EXPECT_FAIL(smla_dense_builder_create(&config, &builder, &error), SMLA_ERROR_VALUE,
                "`path` must be \"separate\" or \"mixed\", got \"bf16\"");
    config = make_config(SMLA_PATH_SEPARATE, 2, 0);
    EXPECT_FAIL(smla_dense_builder_create(&config, &builder, &error), SMLA_ERROR_VALUE,
                "`context_plan` must be 0 to 1, got 2");
    config = make_config(SMLA_PATH_SEPARATE, 0, BLOCK - 1);
    EXPECT_FAIL(
        smla_dense_builder_create(&config, &builder, &error), SMLA_ERROR_VALUE,
        "`prefill_workspace_tokens` must be at least a page of block_size = 4 tokens, got 3");
    config = make_config(SMLA_PATH_SEPARATE, 0, 0);
    config.cp_rank = 2;
    config.cp_size = 2;
    config.cp_interleave = 4;
    EXPECT_FAIL(smla_dense_builder_create(&config, &builder, &error), SMLA_ERROR_VALUE,
                "MetadataBuilder: `cp` must be (rank, ranks, interleave) with 0 <= rank < ranks "
                "and interleave >= 1, got (2, 2, 4)");
    config.struct_size = offsetof(smla_dense_config, cp_rank); /* a caller knew no ranks */
    builder = build(&b, &config, NULL);
    smla_dense_builder_destroy(builder);
    config = make_config(SMLA_PATH_SEPARATE, 0, 0);
    builder = build(&b, &config, NULL);
    smla_dense_forward_args args = forward_args(&b, builder);
    args.kv_b_proj = NULL;
    EXPECT_FAIL(smla_dense_forward(&args, &error), SMLA_ERROR_VALUE, "`kv_b_proj` must");
    args.kv_b_proj = &b.weight->tensor;
    SET(b.block_table, PAGES, 2, 0); /* a page of context that the cache lacks */
    EXPECT_FAIL(smla_dense_forward(&args, &error), SMLA_ERROR_VALUE, "`block_table`");
    smla_dense_builder_destroy(builder);
}

int
main(void)
{
    RUN(test_paths);
    RUN(test_absorbed_weights);
    RUN(test_without_lse);
    RUN(test_metadata);
    RUN(test_errors);
    return report("test_dense_step");
}
