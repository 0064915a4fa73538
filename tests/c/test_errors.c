/* test_errors.c: one fault at a time, in every array of every operator. The call gives the status
 * and a text that names the array, and writes nothing. The same call without the fault works.
 */
#include "core/rule.h" /* in front of testing.h, which has a global `error` */

#include "operators.h"

/* A copy of one array of a call, to be broken. */
typedef struct broken {
    any_args args;
    DLTensor tensor;
    int64_t shape[MAX_NDIM + 2];
    int64_t strides[MAX_NDIM + 2];
} broken;

static void
break_slot(broken *b, const operator_case *op, const any_args *good, const slot *s)
{
    (void)op;
    b->args = *good;
    b->tensor = **array_of(&b->args, s);
    for (int i = 0; i < MAX_NDIM + 2; i++) {
        b->shape[i] = i < b->tensor.ndim ? b->tensor.shape[i] : 1;
        b->strides[i] = i < b->tensor.ndim ? b->tensor.strides[i] : 1;
    }
    b->tensor.shape = b->shape;
    b->tensor.strides = b->strides;
    *array_of(&b->args, s) = &b->tensor;
}

static void
expect_text(const operator_case *op, const broken *b, const char *name, smla_status status,
            const char *rule)
{
    char text[200];
    snprintf(text, sizeof text, "%s: `%s` must %s", op->name, name, rule);
    EXPECT_FAIL(op->call(&b->args, &error), status, text);
    EXPECT(strncmp(error.text, text, strlen(text)) == 0);
    EXPECT_EQ(op->call(&b->args, NULL), status); /* a caller need not ask for the text */
}

static void
for_every_array(void (*test)(const operator_case *, const any_args *, const slot *))
{
    for (int i = 0; i < NUM_OPERATORS; i++) {
        const operator_case *op = &operators[i];
        const any_args good = op->make();
        EXPECT_OK(op->call(&good, &error));
        for (int j = 0; j < MAX_SLOTS && op->slots[j].name != NULL; j++) {
            const int before = failures;
            test(op, &good, &op->slots[j]);
            if (failures != before) {
                printf("    in %s, %s\n", op->name, op->slots[j].name);
            }
        }
        EXPECT_OK(op->call(&good, &error));
        free_arrays(op->name);
    }
}

static void
missing(const operator_case *op, const any_args *good, const slot *s)
{
    broken b;
    break_slot(&b, op, good, s);
    *array_of(&b.args, s) = NULL;
    if (s->flags & OPTIONAL) {
        /* Without its second half the query of make_attention is too short. Without scales the
         * output of make_inverse must be bf16. */
        const bool is_pair = strcmp(s->name, "q[1]") == 0;
        const bool is_scale = strcmp(s->name, "out_scale") == 0;
        EXPECT_EQ(op->call(&b.args, &error), is_pair    ? SMLA_ERROR_VALUE
                                             : is_scale ? SMLA_ERROR_TYPE
                                                        : SMLA_OK);
    } else if (s->flags & NEEDED) {
        EXPECT_EQ(op->call(&b.args, &error), SMLA_ERROR_VALUE);
    } else if (strncmp(s->name, "workspace", strlen("workspace")) == 0 && s->flags & OUTPUT) {
        expect_text(op, &b, s->name, SMLA_ERROR_VALUE, "have at least ");
    } else {
        expect_text(op, &b, s->name, SMLA_ERROR_VALUE, "be given, got none");
    }
}

static void
wrong_dtype(const operator_case *op, const any_args *good, const slot *s)
{
    static const DLDataType wrong[] = {
        {kDLComplex, 64, 1}, {kDLBool, 8, 1}, {kDLFloat, 64, 1}, {kDLInt, 16, 1}, {200, 7, 1}};
    broken b;
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
        break_slot(&b, op, good, s);
        b.tensor.dtype = wrong[i];
        if (wrong[i].code == kDLBool && s->flags & BOOLS) {
            EXPECT_OK(op->call(&b.args, &error));
            continue;
        }
        expect_text(op, &b, s->name, SMLA_ERROR_TYPE, "be ");
    }
    break_slot(&b, op, good, s);
    b.tensor.dtype.lanes = 4;
    expect_text(op, &b, s->name, SMLA_ERROR_TYPE, "be ");
    EXPECT(strstr(error.text, "x4") != NULL);
}

static void
wrong_rank(const operator_case *op, const any_args *good, const slot *s)
{
    broken b;
    const int32_t insane[] = {-1, 9, INT32_MAX, INT32_MIN};
    for (int i = 0; i < 4; i++) {
        break_slot(&b, op, good, s);
        b.tensor.ndim = insane[i];
        expect_text(op, &b, s->name, SMLA_ERROR_VALUE, "have at most 8 dimensions, got ");
    }
    break_slot(&b, op, good, s);
    b.tensor.shape = NULL;
    expect_text(op, &b, s->name, SMLA_ERROR_VALUE, "have ");
    const int32_t ranks[] = {0, 5, 8};
    for (int i = 0; i < 3 && !(s->flags & ANY_RANK); i++) {
        break_slot(&b, op, good, s);
        b.tensor.ndim = ranks[i];
        expect_text(op, &b, s->name, SMLA_ERROR_VALUE, "have ");
    }
}

static void
wrong_shape(const operator_case *op, const any_args *good, const slot *s)
{
    broken b;
    for (int dim = 0; dim < (*array_of((any_args *)(uintptr_t)good, s))->ndim; dim++) {
        break_slot(&b, op, good, s);
        b.shape[dim] = -3;
        expect_text(op, &b, s->name, SMLA_ERROR_VALUE, "have sizes >= 0, got shape [");
        if (s->fixed & 1u << dim) {
            break_slot(&b, op, good, s);
            b.shape[dim]++;
            expect_text(op, &b, s->name, SMLA_ERROR_VALUE, "h"); /* "have shape" or "hold one" */
        }
    }
}

static void
wrong_memory(const operator_case *op, const any_args *good, const slot *s)
{
    broken b;
    break_slot(&b, op, good, s);
    b.tensor.data = NULL;
    expect_text(op, &b, s->name, SMLA_ERROR_VALUE, "have memory, got a null pointer");
    const int step = s->flags & CACHE ? 8 : 1;
    if (s->flags & CACHE || b.tensor.dtype.bits > 8) {
        break_slot(&b, op, good, s);
        b.tensor.byte_offset = (uint64_t)step;
        expect_text(op, &b, s->name, SMLA_ERROR_VALUE, "be aligned to ");
    }
    if (s->flags & CACHE) {
        for (int dim = 0; dim < 2; dim++) {
            break_slot(&b, op, good, s);
            b.strides[dim] += 8;
            expect_text(op, &b, s->name, SMLA_ERROR_VALUE,
                        "have page and token strides in multiples of 16 bytes, got ");
        }
    }
}

/* Sizes, strides and addresses that overflow the integers that hold them. */
static void
wrong_extent(const operator_case *op, const any_args *good, const slot *s)
{
    static const char rule[] = "fit in the address space";
    broken b;
    const int ndim = (*array_of((any_args *)(uintptr_t)good, s))->ndim;
    if ((*array_of((any_args *)(uintptr_t)good, s))->shape[0] > 1) {
        const int64_t strides[] = {INT64_MAX, INT64_MIN, INT64_MAX / 3, INT64_MIN / 2};
        for (int i = 0; i < 4; i++) {
            break_slot(&b, op, good, s);
            b.strides[0] = strides[i];
            expect_text(op, &b, s->name, SMLA_ERROR_VALUE, rule);
        }
    }
    for (int dim = 0; dim < ndim; dim++) {
        break_slot(&b, op, good, s);
        b.shape[dim] = INT64_MAX;
        b.strides[dim] = 0;
        expect_text(op, &b, s->name, SMLA_ERROR_VALUE, rule);
        break_slot(&b, op, good, s);
        b.shape[dim] = INT64_MAX / 2;
        b.tensor.strides = NULL;
        expect_text(op, &b, s->name, SMLA_ERROR_VALUE, rule);
    }
    break_slot(&b, op, good, s);
    b.tensor.byte_offset = UINT64_MAX - 4096;
    expect_text(op, &b, s->name, SMLA_ERROR_VALUE, rule);
}

static void
wrong_last_stride(const operator_case *op, const any_args *good, const slot *s)
{
    if (s->flags & ANY_STRIDE) {
        return;
    }
    const int64_t strides[] = {2, 0, -1};
    for (int i = 0; i < 3; i++) {
        broken b;
        break_slot(&b, op, good, s);
        b.strides[b.tensor.ndim - 1] = strides[i];
        expect_text(op, &b, s->name, SMLA_ERROR_VALUE,
                    "have a contiguous last dimension (stride 1), got stride ");
    }
}

/* Outputs that have an element twice, or go backwards. */
static void
wrong_output(const operator_case *op, const any_args *good, const slot *s)
{
    broken b;
    break_slot(&b, op, good, s);
    if (!(s->flags & OUTPUT) || s->flags & PAGES || b.tensor.ndim < 2) {
        return;
    }
    for (int dim = 0; dim < b.tensor.ndim - 1; dim++) {
        break_slot(&b, op, good, s);
        b.strides[dim] = 0;
        expect_text(op, &b, s->name, SMLA_ERROR_VALUE,
                    "have positive strides (it is written), got 0");
        b.strides[dim] = s->flags & CACHE ? -656 : -2;
        expect_text(op, &b, s->name, SMLA_ERROR_VALUE,
                    "have positive strides (it is written), got -");
        b.strides[dim] = s->flags & CACHE ? 16 : 1;
        expect_text(op, &b, s->name, SMLA_ERROR_VALUE, "have elements that do not overlap");
    }
}

static void
wrong_device(const operator_case *op, const any_args *good, const slot *s)
{
    broken b;
    break_slot(&b, op, good, s);
    b.tensor.device = (DLDevice){.device_type = kDLCUDA, .device_id = 1};
    if (s != &op->slots[0]) {
        char rule[100];
        snprintf(rule, sizeof rule, "be on cpu like `%s`, got cuda:1", op->slots[0].name);
        expect_text(op, &b, s->name, SMLA_ERROR_VALUE, rule);
    } else {
        expect_text(op, &b, op->slots[1].name, SMLA_ERROR_VALUE, "be on cuda:1 like ");
    }
    break_slot(&b, op, good, s); /* pinned memory counts as the CPU's */
    b.tensor.device = (DLDevice){.device_type = kDLCUDAHost, .device_id = 1};
    EXPECT_OK(op->call(&b.args, &error));
}

static void
test_missing(void)
{
    for_every_array(missing);
}

static void
test_dtype(void)
{
    for_every_array(wrong_dtype);
}

static void
test_rank(void)
{
    for_every_array(wrong_rank);
}

static void
test_shape(void)
{
    for_every_array(wrong_shape);
}

static void
test_memory(void)
{
    for_every_array(wrong_memory);
}

static void
test_extent(void)
{
    for_every_array(wrong_extent);
}

static void
test_last_stride(void)
{
    for_every_array(wrong_last_stride);
}

static void
test_output(void)
{
    for_every_array(wrong_output);
}

static void
test_device(void)
{
    for_every_array(wrong_device);
}

/* All arrays are on a device that no build has: a GPU with an absurd number, and a device of an
 * unknown kind. */
static void
test_other_devices(void)
{
    for (int i = 0; i < NUM_OPERATORS; i++) {
        const operator_case *op = &operators[i];
        any_args args = op->make();
        DLTensor tensors[MAX_SLOTS];
        const DLDevice devices[] = {{kDLCUDA, 1 << 20}, {kDLMetal, 2}};
        for (int d = 0; d < 2; d++) {
            for (int j = 0; j < MAX_SLOTS && op->slots[j].name != NULL; j++) {
                const DLTensor **at = array_of(&args, &op->slots[j]);
                tensors[j] = **at;
                tensors[j].device = devices[d];
                *at = &tensors[j];
            }
            EXPECT_FAIL(op->call(&args, &error), SMLA_ERROR_RUNTIME,
                        d == 0 ? "CUDA" : "got DLPack device type 8");
            EXPECT(strncmp(error.text, op->name, strlen(op->name)) == 0);
        }
        free_arrays(op->name);
    }
}

/* Heads, splits, scales and formats of attention, which no array's rule covers. */
static void
test_attention_values(void)
{
    const any_args good = make_attention();
    any_args bad = good;
#define EXPECT_REFUSED(part)                                                            \
    EXPECT_FAIL(smla_sparse_attention(&bad.attention, &error), SMLA_ERROR_VALUE, part); \
    bad = good
    bad.attention.softmax_scale = INFINITY;
    EXPECT_REFUSED("`softmax_scale` must be finite, got inf");
    bad.attention.softmax_scale = -1e300; /* not finite as fp32 */
    EXPECT_REFUSED("`softmax_scale` must be finite, got -1e+300");
    bad.attention.num_splits = 65;
    EXPECT_REFUSED("`num_splits` must be 0 (the plan chooses) or 1 to 64, got 65");
    bad.attention.num_splits = -1;
    EXPECT_REFUSED("got -1");
    bad.attention.kv_format = 77;
    EXPECT_REFUSED("`kv_format` must be a known cache format, got number 77");
    bad.attention.extra_kv_cache = NULL;
    EXPECT_REFUSED("`extra_kv_cache` must be given, got none");
    bad.attention.q = ZEROS(bf16, 3, 0, 512);
    bad.attention.q_pe = ZEROS(bf16, 3, 0, 64);
    EXPECT_REFUSED("`q[0]` must have 1 to 128 heads, got 0");
    bad.attention.q = ZEROS(bf16, 1, 129, 576);
    bad.attention.q_pe = NULL;
    EXPECT_REFUSED("`q` must have 1 to 128 heads, got 129");
#undef EXPECT_REFUSED
    bad.attention.kv_format = SMLA_KV_BFLOAT16;
    EXPECT_FAIL(smla_sparse_attention(&bad.attention, &error), SMLA_ERROR_TYPE,
                "`kv_cache` must be bfloat16 for format bfloat16, got uint8");
}

static void
test_workspace_size_values(void)
{
    const smla_attention_workspace_args good = {
        .struct_size = sizeof good, .num_tokens = 3, .num_heads = 2, .topk = 5, .device = cpu};
    smla_attention_workspace_args bad = good;
    int64_t bytes = -7;
#define EXPECT_REFUSED(status, part)                                                \
    EXPECT_FAIL(smla_attention_workspace_size(&bad, &bytes, &error), status, part); \
    EXPECT_EQ(bytes, -7);                                                           \
    bad = good
    bad.num_tokens = -1;
    EXPECT_REFUSED(SMLA_ERROR_VALUE, "attention_workspace_size: `num_tokens` must be ");
    bad.num_heads = 0;
    EXPECT_REFUSED(SMLA_ERROR_VALUE, "`num_heads` must be 1 to 128, got 0");
    bad.topk = INT64_MAX;
    EXPECT_REFUSED(SMLA_ERROR_VALUE, "`topk` must be ");
    bad.extra_topk = INT64_MIN;
    EXPECT_REFUSED(SMLA_ERROR_VALUE, "`extra_topk` must be ");
    bad.num_splits = 65;
    EXPECT_REFUSED(SMLA_ERROR_VALUE, "`num_splits` must be ");
    bad.head_dim_v = 513;
    EXPECT_REFUSED(SMLA_ERROR_VALUE, "`head_dim_v` must be 1 to 512, got 513");
    bad.head_dim_v = -1;
    EXPECT_REFUSED(SMLA_ERROR_VALUE, "`head_dim_v` must be 1 to 512, got -1");
    bad.num_keys = -1;
    EXPECT_REFUSED(SMLA_ERROR_VALUE, "`num_keys` must be ");
    bad.device.device_type = kDLMetal;
    EXPECT_REFUSED(SMLA_ERROR_RUNTIME, "arrays must be on a device of this build");
#undef EXPECT_REFUSED
    EXPECT_FAIL(smla_attention_workspace_size(&good, NULL, &error), SMLA_ERROR_VALUE,
                "attention_workspace_size: `bytes` must be given, got none");
}

static void
test_lightning_workspace_size(void)
{
    const smla_lightning_workspace_args good = {.struct_size = sizeof good,
                                                .num_tokens = 3,
                                                .max_context = 100,
                                                .k = 5,
                                                .max_logits_bytes = 1 << 29,
                                                .device = cpu};
    smla_lightning_workspace_args bad = good;
    int64_t bytes = -7;
    EXPECT_OK(smla_lightning_indexer_workspace_size(&good, &bytes, &error));
    EXPECT_EQ(bytes, 3 * 512 + 128); /* a clear dtype is fp32 */
#define EXPECT_REFUSED(status, part)                                                        \
    bytes = -7;                                                                             \
    EXPECT_FAIL(smla_lightning_indexer_workspace_size(&bad, &bytes, &error), status, part); \
    EXPECT_EQ(bytes, -7);                                                                   \
    bad = good
    bad.num_tokens = -1;
    EXPECT_REFUSED(SMLA_ERROR_VALUE, "lightning_indexer_workspace_size: `num_tokens` must be ");
    bad.max_context = INT64_MAX;
    EXPECT_REFUSED(SMLA_ERROR_VALUE, "`max_context` must be ");
    bad.k = 0;
    EXPECT_REFUSED(SMLA_ERROR_VALUE, "`k` must be 1 to ");
    bad.max_logits_bytes = INT64_MIN;
    EXPECT_REFUSED(SMLA_ERROR_VALUE, "`max_logits_bytes` must be at least 512, ");
    bad.max_logits_bytes = 511;
    EXPECT_REFUSED(SMLA_ERROR_VALUE, "for the logits of a token, got 511");
    bad.dtype = (DLDataType){kDLFloat, 16, 1};
    EXPECT_REFUSED(SMLA_ERROR_VALUE, "`dtype` must be float32 or bfloat16, got type 2 of 16 bits");
    bad.dtype = (DLDataType){kDLFloat, 32, 2};
    EXPECT_REFUSED(SMLA_ERROR_VALUE, "`dtype` must be float32 or bfloat16");
    bad.device.device_type = kDLMetal;
    EXPECT_REFUSED(SMLA_ERROR_RUNTIME, "arrays must be on a device of this build");
#undef EXPECT_REFUSED
    EXPECT_FAIL(smla_lightning_indexer_workspace_size(&good, NULL, &error), SMLA_ERROR_VALUE,
                "lightning_indexer_workspace_size: `bytes` must be given, got none");
}

/* A checker takes as many arrays as a call may have. It refuses one more, and does not write it. */
static void
test_most_arrays(void)
{
    struct {
        smla_checker checker;
        uint8_t zone[256];
    } memory;
    memset(memory.zone, RED, sizeof memory.zone);
    smla_open_checker(&memory.checker, "many", &error);
    const smla_rule rule = {.name = "x",
                            .tensor = &ARRAY(fp32, 3)->tensor,
                            .dtypes = SMLA_DTYPE_FP32,
                            .ndim = 1,
                            .shape = {SMLA_ANY}};
    for (int i = 0; i < SMLA_MAX_ARRAYS; i++) {
        EXPECT_OK(smla_require(&memory.checker, &rule));
    }
    EXPECT_OK(smla_require_disjoint(&memory.checker));
    EXPECT_FAIL(smla_require(&memory.checker, &rule), SMLA_ERROR_RUNTIME,
                "many: a call has at most 16 arrays, got `x`");
    EXPECT_EQ(memory.checker.num_arrays, SMLA_MAX_ARRAYS);
    for (size_t i = 0; i < sizeof memory.zone; i++) {
        EXPECT_EQ(memory.zone[i], RED);
    }
}

int
main(void)
{
    RUN(test_missing);
    RUN(test_dtype);
    RUN(test_rank);
    RUN(test_shape);
    RUN(test_memory);
    RUN(test_extent);
    RUN(test_last_stride);
    RUN(test_output);
    RUN(test_device);
    RUN(test_other_devices);
    RUN(test_attention_values);
    RUN(test_workspace_size_values);
    RUN(test_lightning_workspace_size);
    RUN(test_most_arrays);
    return report("test_errors");
}
