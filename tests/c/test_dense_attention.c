/* test_dense_attention.c: mla_attention compared with sparse_attention on the slots that a token
 * sees, the texts of its errors, and args structs of older callers. test_attention.c compares
 * sparse_attention with the reference.
 *
 * All tests of values run once per instruction set of the machine.
 */
#include "instruction_sets.h"

#include "reference.h"

enum {
    NUM_TOKENS = 6, /* two of request 0, three of request 1, and one that belongs to none */
    HEADS = 3,
    BLOCK = 4,
    NUM_PAGES = 12,
};

static const int64_t first_token[] = {0, 2, 5};
static const int64_t num_keys[] = {17, 7};
static const int64_t pages[2][5] = {{7, 2, 11, 0, 5}, {3, 9, -1, -1, -1}};

/* The slot of a request's key. */
static int64_t
slot_of(int64_t req, int64_t key)
{
    return pages[req][key / BLOCK] * BLOCK + key % BLOCK;
}

typedef struct dense_call {
    smla_mla_attention_args args;
    array *out, *lse;
} dense_call;

static const DLTensor *
make_workspace(int num_splits)
{
    const smla_attention_workspace_args shape = {.struct_size = sizeof shape,
                                                 .num_tokens = NUM_TOKENS,
                                                 .num_heads = HEADS,
                                                 .topk = num_keys[0],
                                                 .num_splits = num_splits,
                                                 .device = cpu};
    int64_t bytes = -1;
    EXPECT_OK(smla_attention_workspace_size(&shape, &bytes, &error));
    return &ARRAY(uint8, bytes)->tensor;
}

static const DLTensor *
make_block_table(void)
{
    const array *const table = ARRAY(int32, 2, 5);
    for (int64_t row = 0; row < 2; row++) {
        for (int64_t column = 0; column < 5; column++) {
            SET(table, (double)pages[row][column], row, column);
        }
    }
    return &table->tensor;
}

static const DLTensor *
make_slot_table(void)
{
    const array *const table = ARRAY(int32, 2, 17);
    for (int64_t i = 0; i < 34; i++) {
        const int64_t req = i / 17, key = i % 17;
        SET(table, key < num_keys[req] ? (double)slot_of(req, key) : -1.0, req, key);
    }
    return &table->tensor;
}

/* A causal call, whose workspace has exactly the size asked for. */
static dense_call
make_call(DLDataType dtype, int num_splits)
{
    const int64_t row = dtype.bits == 8 ? FP8_ROW : ROW;
    dense_call c = {.out = ARRAY(bf16, NUM_TOKENS, HEADS, NOPE),
                    .lse = ARRAY(fp32, NUM_TOKENS, HEADS)};
    c.args = (smla_mla_attention_args){
        .struct_size = sizeof c.args,
        .q = &fill_normal(ARRAY(bf16, NUM_TOKENS, HEADS, ROW), 1.0)->tensor,
        .kv_cache = &fill_cache(ARRAY(dtype, NUM_PAGES, BLOCK, row))->tensor,
        .block_table = make_block_table(),
        .cache_seqlens = &VECTOR(int32, 17, 7)->tensor,
        .cu_seqlens_q = &VECTOR(int32, 0, 2, 5)->tensor,
        .attn_sink = &fill_normal(ARRAY(fp32, HEADS), 1.0)->tensor,
        .out = &c.out->tensor,
        .lse = &c.lse->tensor,
        .workspace = make_workspace(num_splits),
        .softmax_scale = 0.1,
        .is_causal = 1,
        .num_splits = num_splits};
    return c;
}

/* ---- Values -------------------------------------------------------------------------------- */

/* The keys of a token's request that a window of `left` keys leaves, as slots. */
static const DLTensor *
list_slots(int64_t left)
{
    const array *const slots = fill(ARRAY(int32, NUM_TOKENS, 17), -1.0);
    for (int64_t req = 0; req < 2; req++) {
        for (int64_t token = first_token[req]; token < first_token[req + 1]; token++) {
            const int64_t at = num_keys[req] - first_token[req + 1] + token;
            for (int64_t key = left < 0 || at < left ? 0 : at - left; key <= at; key++) {
                SET(slots, (double)slot_of(req, key), token, key);
            }
        }
    }
    return &slots->tensor;
}

/* Distance of two bf16 numbers in steps of their format. */
static int
steps_between(double a, double b)
{
    const uint32_t x = smla_float_to_bf16((float)a), y = smla_float_to_bf16((float)b);
    const int m = x & 0x8000u ? -(int)(x & 0x7FFFu) : (int)x;
    const int n = y & 0x8000u ? -(int)(y & 0x7FFFu) : (int)y;
    return abs(m - n);
}

/* Compares a call with sparse_attention on explicit slots. Rows of the last token, which belongs to
 * no request, stay as they were. */
static void
expect_same(const dense_call *c, int64_t left)
{
    const array *const out = ARRAY(bf16, NUM_TOKENS, HEADS, NOPE);
    const array *const lse = ARRAY(fp32, NUM_TOKENS, HEADS);
    const smla_sparse_attention_args sparse = {.struct_size = sizeof sparse,
                                               .q = c->args.q,
                                               .q_pe = c->args.q_pe,
                                               .kv_cache = c->args.kv_cache,
                                               .indices = list_slots(left),
                                               .attn_sink = c->args.attn_sink,
                                               .out = &out->tensor,
                                               .lse = &lse->tensor,
                                               .workspace = make_workspace(0),
                                               .softmax_scale = c->args.softmax_scale};
    EXPECT_OK(smla_sparse_attention(&sparse, &error));
    EXPECT_OK(smla_mla_attention(&c->args, &error));
    for (int64_t i = 0; i < (NUM_TOKENS - 1) * HEADS; i++) {
        const int64_t token = i / HEADS, head = i % HEADS;
        EXPECT(isfinite(GET(lse, token, head)));
        EXPECT_NEAR(GET(c->lse, token, head), GET(lse, token, head), 1e-6);
        for (int64_t n = 0; n < NOPE; n++) {
            EXPECT(steps_between(GET(c->out, token, head, n), GET(out, token, head, n)) <= 1);
        }
    }
    EXPECT(is_poison(slice(c->out, 0, NUM_TOKENS - 1, NUM_TOKENS, 1)));
    EXPECT(is_poison(slice(c->lse, 0, NUM_TOKENS - 1, NUM_TOKENS, 1)));
}

static void
test_block_table(void)
{
    const DLDataType dtypes[] = {bf16, uint8};
    for (int i = 0; i < 6; i++) {
        const dense_call c = make_call(dtypes[i % 2], i / 2);
        expect_same(&c, -1);
        free_arrays("test_block_table");
    }
}

static void
test_slot_table(void)
{
    for (int num_splits = 0; num_splits < 3; num_splits++) {
        dense_call c = make_call(uint8, num_splits);
        c.args.block_table = NULL;
        c.args.slot_table = make_slot_table();
        expect_same(&c, -1);
        free_arrays("test_slot_table");
    }
}

static void
test_window(void)
{
    dense_call c = make_call(bf16, 0);
    c.args.window_left = 3; /* without has_window it says nothing */
    expect_same(&c, -1);
    c.args.has_window = 1;
    c.args.window_right = -1;
    expect_same(&c, 3);
}

/* A query as a pair, and out with gaps between its heads. */
static void
test_views(void)
{
    dense_call c = make_call(uint8, 0);
    const array *const q = fill_normal(ARRAY(bf16, NUM_TOKENS, HEADS, ROW + 8), 1.0);
    c.out = slice(ARRAY(bf16, NUM_TOKENS, HEADS + 2, NOPE + 8), 2, 8, NOPE + 8, 1);
    c.args.q = &slice(q, 2, 0, NOPE, 1)->tensor;
    c.args.q_pe = &slice(q, 2, NOPE + 8, ROW + 8, 1)->tensor;
    c.args.out = &c.out->tensor;
    expect_same(&c, -1);
    EXPECT(is_poison(slice(c.out, 1, HEADS, HEADS + 2, 1)));
}

/* [B, n, H, D] has the bits of its tokens as [B * n, H, D] with starts. */
static void
test_tokens_of_one_length(void)
{
    dense_call c = make_call(uint8, 2);
    c.args.cu_seqlens_q = &VECTOR(int32, 0, 3, 6)->tensor;
    EXPECT_OK(smla_mla_attention(&c.args, &error));
    DLTensor tensors[3] = {*c.args.q, *c.args.out, *c.args.lse};
    int64_t shapes[3][4] = {{2, 3, HEADS, ROW}, {2, 3, HEADS, NOPE}, {2, 3, HEADS, 0}};
    const array *const out = ARRAY(bf16, NUM_TOKENS, HEADS, NOPE);
    const array *const lse = ARRAY(fp32, NUM_TOKENS, HEADS);
    tensors[1].data = out->tensor.data;
    tensors[2].data = lse->tensor.data;
    for (int i = 0; i < 3; i++) {
        tensors[i].ndim++;
        tensors[i].shape = shapes[i];
        tensors[i].strides = NULL;
    }
    c.args.q = &tensors[0];
    c.args.out = &tensors[1];
    c.args.lse = &tensors[2];
    c.args.cu_seqlens_q = NULL;
    EXPECT_OK(smla_mla_attention(&c.args, &error));
    EXPECT(memcmp(out->data, c.out->data, out->bytes) == 0);
    EXPECT(memcmp(lse->data, c.lse->data, lse->bytes) == 0);
}

/* ---- Errors -------------------------------------------------------------------------------- */

static void
expect_refused(const smla_mla_attention_args *args, const char *text)
{
    char whole[256];
    snprintf(whole, sizeof whole, "mla_attention: %s", text);
    EXPECT_FAIL(smla_mla_attention(args, &error), SMLA_ERROR_VALUE, whole);
    EXPECT(strcmp(error.text, whole) == 0);
}

/* Refused calls write nothing. */
static void
test_errors(void)
{
    const dense_call good = make_call(uint8, 0);
    smla_mla_attention_args bad = good.args;
#define EXPECT_REFUSED(text)    \
    expect_refused(&bad, text); \
    bad = good.args
    bad.block_table = NULL;
    EXPECT_REFUSED("`block_table` must be given, or `slot_table` in its place, got neither");
    bad.slot_table = bad.block_table;
    EXPECT_REFUSED("`block_table` must be given, or `slot_table` in its place, got both");
    bad.cache_seqlens = NULL;
    EXPECT_REFUSED("`cache_seqlens` must be given, got none");
    bad.cu_seqlens_q = NULL;
    EXPECT_REFUSED("`cache_seqlens` must have shape [6], got [2]: a length per request of the "
                   "query");
    bad.cu_seqlens_q = &VECTOR(int32, 0, 6)->tensor;
    EXPECT_REFUSED("`cu_seqlens_q` must have shape [3], got [2]: one entry more than "
                   "`cache_seqlens`");
    bad.cu_seqlens_q = &VECTOR(int32, 1, 2, 6)->tensor;
    EXPECT_REFUSED("`cu_seqlens_q` must begin with 0 and never fall, got 1 at 0");
    bad.cu_seqlens_q = &VECTOR(int32, 0, 5, 4)->tensor;
    EXPECT_REFUSED("`cu_seqlens_q` must begin with 0 and never fall, got 4 at 2");
    bad.cu_seqlens_q = &VECTOR(int32, 0, 5, 7)->tensor;
    EXPECT_REFUSED("`cu_seqlens_q` must end at most at the 6 tokens of `q`, got 7");
    bad.has_window = 1;
    bad.window_left = -2;
    EXPECT_REFUSED("`window_size` must have -1 (open) or a number of keys on its left, got -2");
    bad.has_window = 1;
    bad.window_right = 1LL << 31;
    EXPECT_REFUSED("`window_size` must have -1 (open) or a number of keys on its right, got "
                   "2147483648");
    bad.attention_chunk = -1;
    EXPECT_REFUSED("`attention_chunk` must be 0 to 2147483647, got -1");
    bad.max_seqlen_q = -1;
    EXPECT_REFUSED("`max_seqlen_q` must be 0 to 2147483647, got -1");
    bad.max_seqlen_k = 1LL << 31;
    EXPECT_REFUSED("`max_seqlen_k` must be 0 to 2147483647, got 2147483648");
    bad.softcap = -0.5;
    EXPECT_REFUSED("`softcap` must be 0 (none) or a positive normal float32, got -0.5");
    bad.softcap = NAN;
    EXPECT_REFUSED("`softcap` must be finite, got nan");
    bad.cp_rank = 2;
    bad.cp_size = 2;
    bad.cp_interleave = 1;
    EXPECT_REFUSED("`cp` must be (rank, ranks, interleave) with 0 <= rank < ranks and interleave "
                   ">= 1, got (2, 2, 1)");
    bad.cp_interleave = 1;
    EXPECT_REFUSED("`cp` must be (rank, ranks, interleave) with 0 <= rank < ranks and interleave "
                   ">= 1, got (0, 0, 1)");
    bad.num_splits = 65;
    EXPECT_REFUSED("`num_splits` must be 0 (the plan chooses) or 1 to 64, got 65");
    bad.softmax_scale = INFINITY;
    EXPECT_REFUSED("`softmax_scale` must be finite, got inf");
#undef EXPECT_REFUSED
    EXPECT(is_poison(good.out));
    EXPECT(is_poison(good.lse));
}

static void
test_workspace(void)
{
    dense_call c = make_call(uint8, 0);
    const int64_t enough = c.args.workspace->shape[0];
    char text[128];
    c.args.workspace = NULL;
    EXPECT_FAIL(smla_mla_attention(&c.args, &error), SMLA_ERROR_VALUE,
                "mla_attention: `workspace` must have at least ");
    const int64_t least = strtoll(strstr(error.text, "least ") + strlen("least "), NULL, 10);
    EXPECT(least > 0 && least <= enough);
    snprintf(text, sizeof text, "`workspace` must have at least %" PRId64 " bytes, got 1", least);
    c.args.workspace = &ARRAY(uint8, 1)->tensor;
    expect_refused(&c.args, text);
    for (int64_t offset = 0; offset <= 64; offset++) { /* enough at any address */
        const array *const bytes = ARRAY(uint8, enough + offset);
        c.args.workspace = &slice(bytes, 0, offset, enough + offset, 1)->tensor;
        EXPECT_OK(smla_mla_attention(&c.args, &error));
    }
    expect_same(&c, -1);
}

static void
test_arrays_of_tokens(void)
{
    const dense_call good = make_call(uint8, 0);
    smla_mla_attention_args bad = good.args;
    bad.q = &ARRAY(bf16, 2, 3, HEADS, ROW)->tensor;
    bad.cu_seqlens_q = NULL;
    expect_refused(&bad, "`out` must have 4 dimensions beside a query of that shape, got 3");
    bad.out = &ARRAY(bf16, 2, 3, HEADS, NOPE)->tensor;
    expect_refused(&bad, "`lse` must have 3 dimensions beside a query of that shape, got 2");
    bad.lse = &ARRAY(fp32, 2, 3, HEADS)->tensor;
    bad.q_pe = &ARRAY(bf16, NUM_TOKENS, HEADS, ROPE)->tensor;
    expect_refused(&bad, "`q[1]` must have 4 dimensions beside a query of that shape, got 3");
    bad.q_pe = NULL;
    bad.cu_seqlens_q = good.args.cu_seqlens_q;
    expect_refused(&bad, "`cu_seqlens_q` must be left out for a query [B, n, H, D], got an array");
    bad.cu_seqlens_q = NULL;
    bad.q = &slice(ARRAY(bf16, 2, 4, HEADS, ROW), 1, 0, 3, 1)->tensor;
    expect_refused(&bad, "`q` must have the tokens of one request behind those of the one before, "
                         "in equal steps, got strides 6912 and 1728 of 3 tokens");
    EXPECT(is_poison(good.out));
}

/* ---- Older callers ------------------------------------------------------------------------- */

/* Structs that end before a field have the field's zero. The memory has exactly their size. */
static void
test_old_struct_sizes(void)
{
    const dense_call c = make_call(uint8, 0);
    const size_t ends[] = {offsetof(smla_mla_attention_args, stream),
                           offsetof(smla_mla_attention_args, num_splits),
                           offsetof(smla_mla_attention_args, kv_format)};
    for (size_t i = 0; i < sizeof ends / sizeof ends[0]; i++) {
        uint8_t *const old = malloc(ends[i]);
        if (old == NULL) {
            exit(2);
        }
        memcpy(old, &c.args, ends[i]);
        memcpy(old, &ends[i], sizeof ends[i]);
        const void *const args = old;
        EXPECT_OK(smla_mla_attention(args, &error));
        free(old);
    }
    expect_same(&c, -1);
}

static void
run_tests(void)
{
    RUN(test_block_table);
    RUN(test_slot_table);
    RUN(test_window);
    RUN(test_views);
    RUN(test_tokens_of_one_length);
}

int
main(void)
{
    run_on_every_instruction_set(run_tests);
    RUN(test_errors);
    RUN(test_workspace);
    RUN(test_arrays_of_tokens);
    RUN(test_old_struct_sizes);
    return report("test_dense_attention");
}
