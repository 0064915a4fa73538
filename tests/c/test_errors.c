/* test_errors.c: one fault at a time, in every array of every operator, of those that Python cannot
 * make. The call gives the status and a text that names the array, and writes nothing. The same
 * call without the fault works.
 */
#include "core/rule.h" /* in front of testing.h, which has a global `error` */

#include "operators.h"

/* A copy of one array of a call, to be broken. */
typedef struct broken {
    any_args args;
    DLTensor tensor;
    int64_t shape[MAX_NDIM + 2];
    int64_t strides[MAX_NDIM + 2];
    char name[32]; /* the array's in errors */
} broken;

/* Makes a copy whose tensor may be broken, and lets the broken tensor replace the good one. */
static void
break_array(broken *b, const any_args *good, size_t offset)
{
    b->args = *good;
    b->tensor = **array_at(&b->args, offset);
    for (int i = 0; i < MAX_NDIM + 2; i++) {
        b->shape[i] = i < b->tensor.ndim ? b->tensor.shape[i] : 1;
        b->strides[i] = i < b->tensor.ndim ? b->tensor.strides[i] : 1;
    }
    b->tensor.shape = b->shape;
    b->tensor.strides = b->strides;
    *array_at(&b->args, offset) = &b->tensor;
}

static void
expect_text(const operator_case *op, const broken *b, smla_status status, const char *rule)
{
    char text[200];
    snprintf(text, sizeof text, "%s: `%s` must %s", title_of(op), b->name, rule);
    EXPECT_FAIL(op->call(&b->args, &error), status, text);
    EXPECT(strncmp(error.text, text, strlen(text)) == 0);
    EXPECT_EQ(op->call(&b->args, NULL), status); /* a caller need not ask for the text */
}

static void
for_every_array(void (*test)(const operator_case *, const any_args *, size_t, broken *))
{
    for (int i = 0; i < NUM_OPERATORS; i++) {
        const operator_case *op = &operators[i];
        const any_args good = op->make();
        size_t offsets[MAX_SLOTS];
        broken b;
        EXPECT_OK(op->call(&good, &error));
        const int count = find_arrays(&good, op->args_bytes, offsets);
        EXPECT(count >= 2);
        for (int j = 0; j < count; j++) {
            const int before = failures;
            find_name(op, &good, offsets[j], b.name);
            test(op, &good, offsets[j], &b);
            if (failures != before) {
                printf("    in %s, %s\n", op->name, b.name);
            }
        }
        EXPECT_OK(op->call(&good, &error));
        free_arrays(op->name);
    }
}

/* Arrays that may be missing: of any operator, and of one. */
static bool
is_optional(const operator_case *op, const char *name)
{
    static const char names[] =
        " attn_sink cache_leftpad counts decode_compressed_indices decode_compressed_lens "
        "extra_topk_length is_valid k_scale max_logits prefill_request_ids qv seq_starts sinks "
        "topk_length v_scale weight_scale_inv dequantize_and_gather_k_cache:gather_lens "
        "absorb_o_proj:o_scale absorb_q_proj:q_scale fused_qnorm_rope_kv_insert:q_out "
        "indexer_logits:starts lightning_indexer:starts varlen_attention:workspace "
        "paged_attention:workspace top_k_per_row:values lightning_indexer:values ";
    char words[2][80];
    snprintf(words[0], sizeof words[0], " %s ", name);
    snprintf(words[1], sizeof words[1], " %s:%s ", op->name, name);
    return strstr(names, words[0]) != NULL || strstr(names, words[1]) != NULL;
}

static void
missing(const operator_case *op, const any_args *good, size_t offset, broken *b)
{
    b->args = *good;
    *array_at(&b->args, offset) = NULL;
    if (is_optional(op, b->name)) {
        EXPECT_OK(op->call(&b->args, &error));
        return;
    }
    const smla_status status = op->call(&b->args, &error);
    EXPECT(status == SMLA_ERROR_VALUE || status == SMLA_ERROR_TYPE);
    EXPECT(strncmp(error.text, title_of(op), strlen(title_of(op))) == 0);
    EXPECT(strstr(error.text, "` must ") != NULL);
}

static void
wrong_dtype(const operator_case *op, const any_args *good, size_t offset, broken *b)
{
    static const DLDataType wrong[] = {{kDLComplex, 64, 1},
                                       {kDLFloat, 64, 1},
                                       {kDLInt, 16, 1},
                                       {200, 7, 1}};
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
        break_array(b, good, offset);
        b->tensor.dtype = wrong[i];
        expect_text(op, b, SMLA_ERROR_TYPE, "be ");
    }
    break_array(b, good, offset);
    b->tensor.dtype.lanes = 4;
    expect_text(op, b, SMLA_ERROR_TYPE, "be ");
    EXPECT(strstr(error.text, "x4") != NULL);
}

/* Ranks, sizes and pointers that no array has. */
static void
insane(const operator_case *op, const any_args *good, size_t offset, broken *b)
{
    const int32_t ranks[] = {-1, 9, INT32_MAX, INT32_MIN};
    for (int i = 0; i < 4; i++) {
        break_array(b, good, offset);
        b->tensor.ndim = ranks[i];
        expect_text(op, b, SMLA_ERROR_VALUE, "have at most 8 dimensions, got ");
    }
    break_array(b, good, offset);
    b->tensor.shape = NULL;
    expect_text(op, b, SMLA_ERROR_VALUE, "have ");
    for (int dim = 0; dim < b->tensor.ndim; dim++) {
        break_array(b, good, offset);
        b->shape[dim] = -3;
        expect_text(op, b, SMLA_ERROR_VALUE, "have sizes >= 0, got shape [");
    }
    break_array(b, good, offset);
    b->tensor.data = NULL;
    expect_text(op, b, SMLA_ERROR_VALUE, "have memory, got a null pointer");
    break_array(b, good, offset);
    if (b->tensor.dtype.bits > 8) {
        b->tensor.byte_offset = 1;
        expect_text(op, b, SMLA_ERROR_VALUE, "be aligned to ");
    }
}

/* Sizes, strides and addresses that overflow the integers that hold them. */
static void
wrong_extent(const operator_case *op, const any_args *good, size_t offset, broken *b)
{
    static const char rule[] = "fit in the address space";
    break_array(b, good, offset);
    const int ndim = b->tensor.ndim;
    if (b->shape[0] > 1) {
        const int64_t strides[] = {INT64_MAX, INT64_MIN, INT64_MAX / 3, INT64_MIN / 2};
        for (int i = 0; i < 4; i++) {
            break_array(b, good, offset);
            b->strides[0] = strides[i];
            expect_text(op, b, SMLA_ERROR_VALUE, rule);
        }
    }
    for (int dim = 0; dim < ndim; dim++) {
        break_array(b, good, offset);
        b->shape[dim] = INT64_MAX;
        b->strides[dim] = 0;
        expect_text(op, b, SMLA_ERROR_VALUE, rule);
        break_array(b, good, offset);
        b->shape[dim] = INT64_MAX / 2;
        b->tensor.strides = NULL;
        expect_text(op, b, SMLA_ERROR_VALUE, rule);
    }
    break_array(b, good, offset);
    b->tensor.byte_offset = UINT64_MAX - 4096;
    expect_text(op, b, SMLA_ERROR_VALUE, rule);
}

/* An array elsewhere is refused beside the first one, or, if it is the first, makes the second one
 * be refused. */
static void
wrong_device(const operator_case *op, const any_args *good, size_t offset, broken *b)
{
    char name[40];
    break_array(b, good, offset);
    b->tensor.device = (DLDevice){.device_type = kDLCUDA, .device_id = 1};
    snprintf(name, sizeof name, "`%s`", b->name);
    EXPECT_FAIL(op->call(&b->args, &error), SMLA_ERROR_VALUE, name);
    EXPECT(strstr(error.text, " must be on c") != NULL && strstr(error.text, "cuda:1") != NULL);
    break_array(b, good, offset); /* pinned memory counts as the CPU's */
    b->tensor.device = (DLDevice){.device_type = kDLCUDAHost, .device_id = 1};
    EXPECT_OK(op->call(&b->args, &error));
}

static void
test_arrays(void)
{
    for_every_array(missing);
    for_every_array(wrong_dtype);
    for_every_array(insane);
    for_every_array(wrong_extent);
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
        size_t offsets[MAX_SLOTS];
        const int count = find_arrays(&args, op->args_bytes, offsets);
        const DLDevice devices[] = {{kDLCUDA, 1 << 20}, {kDLMetal, 2}};
        for (int d = 0; d < 2; d++) {
            for (int j = 0; j < count; j++) {
                const DLTensor **at = array_at(&args, offsets[j]);
                tensors[j] = **at;
                tensors[j].device = devices[d];
                *at = &tensors[j];
            }
            EXPECT_FAIL(op->call(&args, &error), SMLA_ERROR_RUNTIME,
                        d == 0 ? "CUDA" : "got DLPack device type 8");
            EXPECT(strncmp(error.text, title_of(op), strlen(title_of(op))) == 0);
        }
        free_arrays(op->name);
    }
}

/* Heads, splits, scales and formats of attention, which no array's rule covers. */
static void
test_attention_values(void)
{
    const any_args good = make_sparse_attention();
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
    RUN(test_arrays);
    RUN(test_other_devices);
    RUN(test_attention_values);
    RUN(test_workspace_size_values);
    RUN(test_lightning_workspace_size);
    RUN(test_most_arrays);
    return report("test_errors");
}
