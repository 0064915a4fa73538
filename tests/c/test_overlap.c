/* test_overlap.c: which arrays may lie in one buffer. Columns, rows and pages of one buffer are
 * disjoint; an array that shares a byte with an output is refused.
 */
#include "core/overlap.h"
#include "operators.h"

static smla_status
merge(const array *out_a, const array *lse_a, const array *out_b, const array *lse_b,
      const array *out, const array *lse)
{
    const smla_merge_attn_states_args args = {.struct_size = sizeof args,
                                              .out_a = &out_a->tensor,
                                              .lse_a = &lse_a->tensor,
                                              .out_b = &out_b->tensor,
                                              .lse_b = &lse_b->tensor,
                                              .out = &out->tensor,
                                              .lse = &lse->tensor};
    return smla_merge_attn_states(&args, &error);
}

static array *
buffer_of(int64_t tokens, int64_t heads, int64_t columns)
{
    return fill_normal(ARRAY(fp32, tokens, heads, columns), 1.0);
}

/* One column of [T, H, n] as [T, H]. */
static array *
column(const array *buffer, int64_t at)
{
    array *view = slice(buffer, 2, at, at + 1, 1);
    view->tensor.ndim = 2;
    return view;
}

static void
test_columns(void)
{
    const array *b = buffer_of(3, 2, 16);
    const array *a = slice(b, 2, 0, 4, 1);
    const array *lse = column(buffer_of(3, 2, 1), 0);
    /* All arrays are in one buffer: three blocks of values and three columns of states. */
    EXPECT_OK(merge(a, column(b, 12), slice(b, 2, 4, 8, 1), column(b, 13), slice(b, 2, 8, 12, 1),
                    column(b, 14)));
    /* One column too far to the left, and to the right. */
    EXPECT_FAIL(merge(a, lse, a, lse, slice(b, 2, 3, 7, 1), column(b, 14)), SMLA_ERROR_VALUE,
                "merge_attn_states: `out` must be the whole of or not overlap `out_a`, got arrays "
                "that share memory");
    EXPECT_FAIL(merge(a, column(b, 12), a, lse, slice(b, 2, 9, 13, 1), column(b, 15)),
                SMLA_ERROR_VALUE, "`out` must not overlap `lse_a`");
    EXPECT_FAIL(merge(a, lse, a, lse, a, column(b, 14)), SMLA_ERROR_VALUE,
                "`out` must not overlap `out_b`"); /* only the first side may be it */
    EXPECT_OK(merge(a, column(b, 12), a, column(b, 13), slice(b, 2, 8, 12, 1), column(b, 13)));
    EXPECT_FAIL(merge(a, lse, a, lse, slice(b, 2, 8, 12, 1), column(b, 11)), SMLA_ERROR_VALUE,
                "`out` must not overlap `lse`"); /* two outputs */
}

/* Strides that are longer than any memory, but whose sums may wrap around to a valid address. */
static void
test_steps_that_go_round(void)
{
    const int64_t step = INT64_C(1) << 62;
    const int64_t steps[][4] = {{step, step, step, step},
                                {-step, -step, -step, -step},
                                {step, -step, step, -step},
                                {0, 0, 0, INT64_C(1) << 61}};
    uint8_t byte = 0;
    int64_t shape[4] = {2, 2, 2, 2};
    for (int i = 0; i < 4; i++) {
        int64_t strides[4];
        memcpy(strides, steps[i], sizeof strides);
        const DLTensor tensor = {.data = &byte,
                                 .device = cpu,
                                 .ndim = 4,
                                 .dtype = uint8,
                                 .shape = shape,
                                 .strides = strides};
        smla_byte_range range;
        EXPECT(!smla_find_byte_range(&tensor, &range));
        EXPECT_EQ(smla_find_overlap(&tensor, &tensor), SMLA_OVERLAP_UNKNOWN);
    }
}

static void
test_rows_and_heads(void)
{
    const array *b = buffer_of(6, 4, 5);
    const array *lse_a = column(buffer_of(3, 2, 1), 0);
    const array *lse = column(buffer_of(3, 2, 1), 0);
    const array *even = slice(slice(b, 0, 0, 6, 2), 1, 0, 2, 1);
    const array *odd = slice(slice(b, 0, 1, 6, 2), 1, 0, 2, 1);
    const array *right = slice(slice(b, 0, 0, 6, 2), 1, 2, 4, 1);
    EXPECT_OK(merge(even, lse_a, right, lse_a, odd, lse));
    EXPECT_OK(merge(odd, lse_a, right, lse_a, even, lse));
    EXPECT_OK(merge(slice(even, 0, 0, 3, -1), lse_a, odd, lse_a, right, lse)); /* backwards */
    EXPECT_FAIL(merge(odd, lse_a, even, lse_a, slice(slice(b, 0, 0, 6, 2), 1, 1, 3, 1), lse),
                SMLA_ERROR_VALUE, "`out` must be the whole of or not overlap `out_b`");
    EXPECT_OK(merge(even, lse_a, even, lse_a, odd, lse)); /* inputs may be one array */
}

/* Two arrays that touch, then two that overlap by one element. */
static void
test_neighbours(void)
{
    const array *line = fill(ARRAY(fp32, 1, 1, 40), 1.0);
    const array *lse = column(buffer_of(1, 1, 1), 0);
    const array *lse_a = fill(ARRAY(fp32, 1, 1), 0.0);
    const array *a = slice(line, 2, 10, 20, 1);
    EXPECT_OK(merge(a, lse_a, a, lse_a, slice(line, 2, 20, 30, 1), lse));
    EXPECT_OK(merge(a, lse_a, a, lse_a, slice(line, 2, 0, 10, 1), lse));
    EXPECT_FAIL(merge(a, lse_a, a, lse_a, slice(line, 2, 19, 29, 1), lse), SMLA_ERROR_VALUE,
                "not overlap");
    EXPECT_FAIL(merge(a, lse_a, a, lse_a, slice(line, 2, 1, 11, 1), lse), SMLA_ERROR_VALUE,
                "not overlap");
    /* Arrays without elements share nothing, wherever they are. */
    const array *none = slice(line, 2, 10, 10, 1);
    EXPECT_OK(merge(none, lse_a, none, lse_a, none, lse));
}

/* Two layers share every page of a buffer: one layer is read while the other is written. */
static void
test_interleaved_pages(void)
{
    const array *both = fill_normal(ARRAY(bf16, 3, 8, 576), 1.0);
    const array *first = slice(both, 1, 0, 4, 1);
    smla_dequantize_kv_cache_args args = {.struct_size = sizeof args,
                                          .kv_cache = &first->tensor,
                                          .out = &slice(both, 1, 4, 8, 1)->tensor};
    EXPECT_OK(smla_dequantize_kv_cache(&args, &error));
    args.out = &slice(both, 1, 3, 7, 1)->tensor;
    EXPECT_FAIL(smla_dequantize_kv_cache(&args, &error), SMLA_ERROR_VALUE,
                "dequantize_kv_cache: `out` must not overlap `kv_cache`");
}

/* Whether an output may be an input of the same shape: its name is the input's with _out, behind
 * or instead of _pe; or it is a side's without _a or _b. */
static bool
may_be(const char *output, const char *input)
{
    const char *const end = strstr(input, "_pe");
    const int length = (int)(end == NULL ? strlen(input) : (size_t)(end - input));
    char name[64];
    snprintf(name, sizeof name, "%.*s_out", length, input);
    const size_t stem = strlen(output);
    const bool is_side = strncmp(input, output, stem) == 0 &&
                         (strcmp(input + stem, "_a") == 0 || strcmp(input + stem, "_b") == 0);
    return is_side || strcmp(output, name) == 0;
}

/* Every output of every operator put onto every other array. */
static void
test_every_output(void)
{
    for (int i = 0; i < NUM_OPERATORS; i++) {
        const operator_case *op = &operators[i];
        any_args good = op->make();
        size_t offsets[MAX_SLOTS];
        char names[MAX_SLOTS][32];
        const int count = find_arrays(&good, op->args_bytes, offsets);
        for (int j = 0; j < count; j++) {
            find_name(op, &good, offsets[j], names[j]);
        }
        for (int pair = 0; pair < count * count; pair++) {
            const int j = pair / count, k = pair % count;
            if (j == k || !is_written(op, names[j])) {
                continue;
            }
            any_args bad = good;
            DLTensor moved = **array_at(&good, offsets[j]);
            moved.data = (*array_at(&good, offsets[k]))->data;
            *array_at(&bad, offsets[j]) = &moved;
            if (may_be(names[j], names[k])) {
                EXPECT_OK(op->call(&bad, &error));
                continue;
            }
            EXPECT_FAIL(op->call(&bad, &error), SMLA_ERROR_VALUE, " not overlap `");
            EXPECT(strstr(error.text, names[j]) != NULL);
        }
        free_arrays(op->name);
    }
}

/* ---- Aliases ------------------------------------------------------------------------------- */

/* A view of a buffer's memory from its first element on. */
static array *
alias(const array *buffer, int ndim, const int64_t *shape, const int64_t *strides)
{
    array *const view = view_of(buffer);
    view->tensor.ndim = ndim;
    memcpy(view->shape, shape, (size_t)ndim * sizeof *shape);
    memcpy(view->strides, strides, (size_t)ndim * sizeof *strides);
    return view;
}

static smla_status
normalize(const array *q, const array *kv, const array *q_out, const array *kv_out)
{
    const smla_fused_q_kv_rmsnorm_args args = {
        .struct_size = sizeof args,
        .q = &q->tensor,
        .kv = &kv->tensor,
        .q_weight = &fill(ARRAY(fp32, q->shape[1]), 1.0)->tensor,
        .kv_weight = &fill(ARRAY(fp32, 512), 1.0)->tensor,
        .q_out = &q_out->tensor,
        .kv_out = &kv_out->tensor,
        .eps = 1e-6,
    };
    return smla_fused_q_kv_rmsnorm(&args, &error);
}

/* An output that may be its input has the input's address, shape and strides. With the address and
 * the shape, but with other strides, a row would be written before it is read. */
static void
test_aliases_with_other_strides(void)
{
    enum { ROWS = 3, Q_SIZE = 24 };
    static const struct {
        int64_t in, out; /* rows from one row to the next, in elements */
        bool is_same;
    } cases[] = {
        {24, 24, true},  {40, 40, true},  {24, 32, false}, {32, 24, false},
        {40, 80, false}, {80, 40, false}, {24, 48, false}, {32, 40, false},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        const int64_t in = cases[i].in;
        const int64_t out = cases[i].out;
        const array *const q_buffer = fill_normal(ARRAY(bf16, 400), 1.0);
        const array *const kv_buffer = fill_normal(ARRAY(bf16, ROWS * 700), 1.0);
        const array *const other = ARRAY(bf16, ROWS, Q_SIZE);
        const array *const other_kv = ARRAY(bf16, ROWS, 512);
        const int64_t q_shape[2] = {ROWS, Q_SIZE};
        const int64_t kv_shape[2] = {ROWS, 512};
        const array *const q = alias(q_buffer, 2, q_shape, (int64_t[]){in, 1});
        const array *const q_out = alias(q_buffer, 2, q_shape, (int64_t[]){out, 1});
        const array *const kv = alias(kv_buffer, 2, kv_shape, (int64_t[]){488 + in, 1});
        const array *const kv_out = alias(kv_buffer, 2, kv_shape, (int64_t[]){488 + out, 1});
        if (cases[i].is_same) {
            EXPECT_OK(normalize(q, kv, q_out, other_kv));
            EXPECT_OK(normalize(q, kv, other, kv_out));
        } else {
            EXPECT_FAIL(normalize(q, kv, q_out, other_kv), SMLA_ERROR_VALUE,
                        "`q_out` must be the whole of or not overlap `q`");
            EXPECT_FAIL(normalize(q, kv, other, kv_out), SMLA_ERROR_VALUE,
                        "`kv_out` must be the whole of or not overlap `kv`");
        }
        free_arrays("test_aliases_with_other_strides");
    }
}

/* The stride of a dimension of one element moves nothing, so any two are the same array. */
static void
test_aliases_of_one_row(void)
{
    static const int64_t strides[] = {24, 40, 1, 0, 7, -5};
    const array *const buffer = fill_normal(ARRAY(bf16, 24), 1.0);
    const array *const kv = fill_normal(ARRAY(bf16, 1, 512), 1.0);
    for (int i = 0; i < 36; i++) {
        const int64_t shape[2] = {1, 24};
        const array *const q = alias(buffer, 2, shape, (int64_t[]){strides[i / 6], 1});
        const array *const q_out = alias(buffer, 2, shape, (int64_t[]){strides[i % 6], 1});
        EXPECT_OK(normalize(q, kv, q_out, kv));
    }
}

/* Heads and tokens: each of three strides alone differs, and two of them change places. */
static void
test_aliases_of_queries(void)
{
    enum { TOKENS = 3, HEADS = 2 };
    static const int64_t strides[][2] = {{1024, 512}, {1536, 512},  {1040, 520},
                                         {512, 1536}, {2048, 1024}, {1536, 520}};
    enum { NUM = sizeof strides / sizeof strides[0] };
    const array *const buffer = fill_normal(ARRAY(bf16, 5632), 1.0);
    const int64_t shape[3] = {TOKENS, HEADS, 512};
    any_args args = make_fused_qnorm_rope_kv_insert();
    for (int i = 0; i < NUM * NUM; i++) {
        const int64_t *const in = strides[i / NUM];
        const int64_t *const out = strides[i % NUM];
        const array *const q = alias(buffer, 3, shape, (int64_t[]){in[0], in[1], 1});
        const array *const q_out = alias(buffer, 3, shape, (int64_t[]){out[0], out[1], 1});
        args.qnorm.q = &q->tensor;
        args.qnorm.q_out = &q_out->tensor;
        if (i / NUM == i % NUM) {
            EXPECT_OK(smla_fused_qnorm_rope_kv_insert(&args.qnorm, &error));
        } else {
            EXPECT_FAIL(smla_fused_qnorm_rope_kv_insert(&args.qnorm, &error), SMLA_ERROR_VALUE,
                        "`q_out` must be the whole of or not overlap `q`");
        }
    }
}

/* With the address and the strides, but with more heads or fewer tokens, it is another array. */
static void
test_aliases_of_other_shapes(void)
{
    const array *const buffer = fill_normal(ARRAY(bf16, 3, 4, 512), 1.0);
    const array *const q = slice(buffer, 1, 0, 2, 1);
    const array *const others[] = {
        buffer,
        slice(buffer, 1, 0, 3, 1),
        slice(slice(buffer, 0, 0, 2, 1), 1, 0, 2, 1),
        slice(slice(buffer, 0, 0, 1, 1), 1, 0, 2, 1),
    };
    any_args args = make_fused_qnorm_rope_kv_insert();
    args.qnorm.q = &q->tensor;
    args.qnorm.q_out = &slice(buffer, 1, 0, 2, 1)->tensor;
    EXPECT_OK(smla_fused_qnorm_rope_kv_insert(&args.qnorm, &error));
    for (size_t i = 0; i < sizeof others / sizeof others[0]; i++) {
        const int64_t tokens = others[i]->shape[0];
        args.qnorm.q_out = &others[i]->tensor;
        args.qnorm.slot_mapping = ZEROS(int64, tokens);
        EXPECT_FAIL(smla_fused_qnorm_rope_kv_insert(&args.qnorm, &error), SMLA_ERROR_VALUE,
                    "`q_out` must be the whole of or not overlap `q`");
    }
}

/* Only the array that an output may be: the other inputs, and the output's own fellow, never. Fewer
 * rows or columns of it are not the whole either. */
static void
test_aliases_of_others(void)
{
    const array *const q = fill_normal(ARRAY(bf16, 3, 512), 1.0);
    const array *const kv = fill_normal(ARRAY(bf16, 3, 512), 1.0);
    EXPECT_FAIL(normalize(q, kv, kv, q), SMLA_ERROR_VALUE, "`q_out` must not overlap `kv`");
    EXPECT_FAIL(normalize(q, kv, q, q), SMLA_ERROR_VALUE, "overlap");
    /* One DLTensor for both inputs. Each is an input of its own. */
    EXPECT_OK(normalize(q, q, ARRAY(bf16, 3, 512), ARRAY(bf16, 3, 512)));
    EXPECT_FAIL(normalize(q, q, q, kv), SMLA_ERROR_VALUE, "`q_out` must not overlap `kv`");
    EXPECT_FAIL(normalize(q, q, kv, q), SMLA_ERROR_VALUE, "`kv_out` must not overlap `kv`");
    const array *const same_rows = alias(q, 2, (int64_t[]){3, 512}, (int64_t[]){0, 1});
    EXPECT_FAIL(normalize(q, kv, same_rows, kv), SMLA_ERROR_VALUE,
                "`q_out` must have positive strides (it is written), got 0 in dimension 0");
    EXPECT_FAIL(normalize(same_rows, kv, same_rows, kv), SMLA_ERROR_VALUE, "got 0 in dimension 0");
    const array *const wide = fill_normal(ARRAY(bf16, 4, 520), 1.0);
    const array *const in = slice(slice(wide, 0, 0, 3, 1), 1, 0, 512, 1);
    const array *const later = slice(slice(wide, 0, 1, 4, 1), 1, 0, 512, 1);
    const array *const right = slice(slice(wide, 0, 0, 3, 1), 1, 8, 520, 1);
    EXPECT_OK(normalize(in, kv, in, kv));
    EXPECT_FAIL(normalize(in, kv, later, kv), SMLA_ERROR_VALUE, "`q_out` must be the whole of");
    EXPECT_FAIL(normalize(later, kv, in, kv), SMLA_ERROR_VALUE, "`q_out` must be the whole of");
    EXPECT_FAIL(normalize(in, kv, right, kv), SMLA_ERROR_VALUE, "`q_out` must be the whole of");
}

/* ---- At random ----------------------------------------------------------------------------- */

enum { LINE = 256 };

/* Marks the elements of a [2, 3, 2] view of a line; false when one of them was marked by
 * `others`. */
static bool
mark(const array *view, const array *line, uint8_t *marks, uint8_t self, uint8_t others)
{
    bool good = true;
    for (int64_t i = 0; i < 12; i++) {
        const float *at = AT(view, i / 6, i / 2 % 3, i % 2);
        uint8_t *here = &marks[at - (const float *)line->tensor.data];
        good = good && (*here & others) == 0;
        *here |= self;
    }
    return good;
}

/* Arrays that the call accepts share no byte, which is found out here element by element. */
static void
test_random_views(void)
{
    const array *line = fill(ARRAY(fp32, LINE), 1.0);
    const array *lse = ARRAY(fp32, 2, 3);
    const array *lse_a = fill(ARRAY(fp32, 2, 3), 0.0);
    int num_accepted = 0;
    int num_disjoint = 0;
    for (int i = 0; i < 20000; i++) {
        array *views[2];
        for (int v = 0; v < 2; v++) {
            views[v] = view_of(line);
            views[v]->tensor.ndim = 3;
            memcpy(views[v]->shape, (int64_t[]){2, 3, 2}, 3 * sizeof(int64_t));
            memcpy(views[v]->strides, (int64_t[]){random_int(24), random_int(24), 1},
                   3 * sizeof(int64_t));
            views[v]->tensor.data = (float *)line->tensor.data + random_int(LINE - 24 * 4);
        }
        uint8_t marks[LINE] = {0};
        bool good = mark(views[0], line, marks, 1, 0);
        good = mark(views[1], line, marks, 2, 1) && good;
        uint8_t own[LINE] = {0};
        for (int64_t at = 0; at < 12; at++) { /* the output must not have an element twice */
            const float *element = AT(views[1], at / 6, at / 2 % 3, at % 2);
            good = good && own[element - (const float *)line->tensor.data]++ == 0;
        }
        const smla_status status = merge(views[0], lse_a, views[0], lse_a, views[1], lse);
        EXPECT(status != SMLA_OK || good);
        num_accepted += status == SMLA_OK;
        num_disjoint += good;
        free(arrays[--num_arrays]);
        free(arrays[--num_arrays]);
    }
    printf("  random views: %d of %d disjoint pairs accepted\n", num_accepted, num_disjoint);
    EXPECT(num_accepted > num_disjoint / 2);
}

int
main(void)
{
    RUN(test_columns);
    RUN(test_steps_that_go_round);
    RUN(test_rows_and_heads);
    RUN(test_neighbours);
    RUN(test_interleaved_pages);
    RUN(test_every_output);
    RUN(test_aliases_with_other_strides);
    RUN(test_aliases_of_one_row);
    RUN(test_aliases_of_queries);
    RUN(test_aliases_of_other_shapes);
    RUN(test_aliases_of_others);
    RUN(test_random_views);
    return report("test_overlap");
}
